#include "shm/tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>

namespace tp_ext::shm {

using at::Tensor;

void check_tensor(const Tensor& t) {
  TORCH_CHECK_VALUE(t.device().is_cpu(), "tensor: device ", t.device(),
                    " must be cpu for the backend tp_shm");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, "tensor: layout ", t.layout(), " must be strided");
}

const Tensor& only(const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "tensors: ", tensors.size(), " must be one");
  check_tensor(tensors[0]);
  return tensors[0];
}

void check_same(const Tensor& a, const Tensor& b) {
  check_tensor(a);
  check_tensor(b);
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), "tensors: dtypes ", a.scalar_type(), " and ",
                   b.scalar_type(), " must be the same");
}

void check_numel(const Tensor& t, int64_t numel, const char* name) {
  TORCH_CHECK_VALUE(t.numel() == numel, name, ": a tensor of ", t.numel(), " elements must have ",
                    numel);
}

void check_lists(const Tensors& out, const Tensors& in) {
  TORCH_CHECK_VALUE(out.size() == in.size(), "outputs: ", out.size(),
                    " must be as many as inputs, ", in.size());
}

Tensor as_reals(const Tensor& t) { return t.is_complex() ? at::view_as_real(t) : t; }

namespace {

uint64_t shape_hash(const Tensor& t) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const int64_t n : t.sizes())
    if (n != 1) hash = (hash ^ static_cast<uint64_t>(n)) * 1099511628211u;
  return hash;
}

}  // namespace

Elements elements_of(const Tensor& t, Operation operation) {
  if (t.is_complex())
    TORCH_CHECK_VALUE(operation == Operation::kSum || operation == Operation::kAverage,
                      "op: must be SUM or AVG for complex tensors");
  const auto dtype = c10::toRealValueType(t.scalar_type());
  const int64_t reals = t.is_complex() ? 2 : 1;
  return {t.numel() * reals, t.element_size() / reals,         combine_for(dtype, operation),
          type_of(t),        static_cast<uint32_t>(operation), shape_hash(t)};
}

int64_t bytes_of(const Tensor& t) { return t.numel() * t.element_size(); }
uint32_t type_of(const Tensor& t) { return static_cast<uint32_t>(t.scalar_type()); }
void* data(const Tensor& t) { return t.mutable_data_ptr(); }

std::optional<Rows> rows_of(const Tensor& t) {
  const int64_t bytes = bytes_of(t), element = t.element_size();
  if (bytes == 0) return Rows(data(t), 0);
  int64_t row = element, step = 0, rows = 1;  // step: 0 before a dim that is not contiguous
  for (int64_t dim = t.dim() - 1; dim >= 0; --dim) {
    const int64_t n = t.size(dim), stride = t.stride(dim) * element;
    if (n == 1) continue;
    if (step == 0 && stride == row)
      row *= n;
    else if (step == 0 && stride > row && row > element)
      step = stride, rows = n;
    else if (step == 0 || stride != step * rows)
      return std::nullopt;
    else
      rows *= n;
  }
  return Rows(data(t), bytes, row, step == 0 ? row : step);
}

Tensor Outputs::add(const Tensor& t, bool load) {
  check_tensor(t);
  if (t.is_contiguous()) return t;
  Tensor dense = load ? t.contiguous() : at::empty_like(t, at::MemoryFormat::Contiguous);
  copies_.emplace_back(t, dense);
  return dense;
}

// Called by the thread that finds the call done, in whatever grad mode that thread has
void Outputs::store() const {
  if (copies_.empty()) return;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& [to, from] : copies_) to.copy_(from);
}

Blocks divide(const Tensor& t, const std::vector<int64_t>& sizes, int ranks, const char* name) {
  const int64_t n = t.dim() > 0 ? t.size(0) : 1, row = n > 0 ? bytes_of(t) / n : 0;
  TORCH_CHECK_VALUE(sizes.empty() ? n % ranks == 0 : sizes.size() == static_cast<size_t>(ranks),
                    name, ": ", sizes, " must have one entry per rank, or be empty and dim 0, ", n,
                    ", a multiple of ", ranks);
  Blocks blocks;
  int64_t total = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t rows = sizes.empty() ? n / ranks : sizes[rank];
    TORCH_CHECK_VALUE(rows >= 0, name, ": ", sizes, " must not hold a negative size");
    blocks.at.push_back(static_cast<char*>(data(t)) + total * row);
    blocks.bytes.push_back(rows * row);
    total += rows;
  }
  TORCH_CHECK_VALUE(total == n, name, ": ", sizes, " must sum to dim 0, ", n);
  return blocks;
}

}  // namespace tp_ext::shm
