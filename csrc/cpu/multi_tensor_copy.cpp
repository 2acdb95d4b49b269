// Copies of many tensors, which may be views of parts of others, as rows of bytes.

#include <ATen/Parallel.h>
#include <ATen/ops/_foreach_copy.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/copy_rows.h"
#include "types.h"

namespace tp_ext {
namespace {

constexpr int64_t kPart = 1 << 18;  // bytes worth a task of their own

struct Dim {
  int64_t size, to_step, from_step;  // bytes
};

// The dims of a copy from the outermost to that of bytes, adjacent ones as one where both tensors
// allow it; empty: no rows of bytes.
std::vector<Dim> rows_of(const Tensor& to, const Tensor& from) {
  if (to.dtype() != from.dtype() || to.sizes() != from.sizes() || to.is_neg() != from.is_neg() ||
      to.is_conj() != from.is_conj())
    return {};
  const int64_t bytes = to.element_size();
  std::vector<Dim> dims{{bytes, 1, 1}};
  for (int64_t d = to.dim() - 1; d >= 0; --d) {
    const Dim dim{to.size(d), to.stride(d) * bytes, from.stride(d) * bytes};
    Dim& inner = dims.back();
    if (dim.size == 1) continue;
    if (dim.to_step == inner.size * inner.to_step && dim.from_step == inner.size * inner.from_step)
      inner.size *= dim.size;
    else
      dims.push_back(dim);
  }
  if (dims.size() > 1 && dims[0].size == bytes) return {};  // elements apart: torch transposes
  std::reverse(dims.begin(), dims.end());
  return dims;
}

void copy(char* to, const char* from, const std::vector<Dim>& dims, size_t first, bool streamed) {
  const size_t left = dims.size() - first;
  if (left > 2) {
    const auto [size, to_step, from_step] = dims[first];
    for (int64_t i = 0; i < size; ++i)
      copy(to + i * to_step, from + i * from_step, dims, first + 1, streamed);
    return;
  }
  const int64_t n = dims.back().size;
  const Dim rows = left == 2 ? dims[first] : Dim{1, n, n};
  // Long rows are divided, short ones taken together
  const int64_t parts = std::max<int64_t>(1, n / kPart), part = (n + parts - 1) / parts;
  at::parallel_for(
      0, rows.size * parts, std::max<int64_t>(1, kPart / n), [&](int64_t a, int64_t b) {
        if (parts == 1)
          return copy_rows(to + a * rows.to_step, rows.to_step, from + a * rows.from_step,
                           rows.from_step, n, b - a, streamed);
        for (int64_t i = a; i < b; ++i) {
          const int64_t row = i / parts, begin = i % parts * part;
          copy_rows(to + row * rows.to_step + begin, 0, from + row * rows.from_step + begin, 0,
                    std::min(part, n - begin), 1, streamed);
        }
      });
}

void copy_tensors(at::TensorList outs, at::TensorList values) {
  TORCH_CHECK_VALUE(outs.size() == values.size(), "outs: ", outs.size(),
                    " tensors must be as many as values, ", values.size());
  int64_t total = 0;
  for (const auto& out : outs) total += static_cast<int64_t>(out.nbytes());
  std::vector<Tensor> other_outs, other_values;
  for (size_t i = 0; i < outs.size(); ++i) {
    if (outs[i].numel() == 0) continue;
    const auto dims = rows_of(outs[i], values[i]);
    if (dims.empty()) {
      other_outs.push_back(outs[i]);
      other_values.push_back(values[i]);
      continue;
    }
    copy(static_cast<char*>(outs[i].mutable_data_ptr()),
         static_cast<const char*>(values[i].const_data_ptr()), dims, 0, total >= kStreamed);
    if (!outs[i].is_inference()) outs[i].unsafeGetTensorImpl()->bump_version();
  }
  if (!other_outs.empty()) at::_foreach_copy_(other_outs, other_values);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) { m.impl("_multi_tensor_copy_", copy_tensors); }

}  // namespace tp_ext
