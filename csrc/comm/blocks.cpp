#include "comm/blocks.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/movedim.h>
#include <ATen/ops/zeros.h>

namespace tp_ext::comm {

using at::Tensor;
using c10::SymInt;

Tensor fresh_contiguous(const Tensor& x) { return x.clone(at::MemoryFormat::Contiguous); }

std::vector<SymInt> with_dim(const Tensor& x, int64_t dim, const SymInt& n) {
  auto shape = x.sym_sizes().vec();
  shape[dim] = n;
  return shape;
}

std::vector<SymInt> stacked(int64_t p, c10::SymIntArrayRef shape) {
  std::vector<SymInt> result{p};
  result.insert(result.end(), shape.begin(), shape.end());
  return result;
}

bool is_empty(const std::vector<SymInt>& shape) {
  for (const auto& n : shape)
    if (n == 0) return true;
  return false;
}

Tensor padded(const Tensor& x, int64_t dim, const SymInt& n) {
  if (x.sym_size(dim) == n) return x.contiguous();
  auto result = at::zeros_symint(with_dim(x, dim, n), x.options());
  result.narrow_symint(dim, 0, x.sym_size(dim)).copy_(x);
  return result;
}

Tensor own_part(const Tensor& block, int64_t dim, const SymInt& n) {
  return block.sym_size(dim) == n ? block : fresh_contiguous(block.narrow_symint(dim, 0, n));
}

Tensor blocks_of(const Tensor& x, int64_t dim, const Split& split) {
  const int64_t p = static_cast<int64_t>(split.sizes.size());
  const auto longest = split.longest();
  if (split.even()) {
    auto shape = x.sym_sizes().vec();
    shape[dim] = longest;
    shape.insert(shape.begin() + dim, p);
    return x.reshape_symint(shape).movedim(dim, 0).contiguous();
  }
  auto blocks = at::zeros_symint(stacked(p, with_dim(x, dim, longest)), x.options());
  for (int64_t k = 0; k < p; ++k)
    blocks.select(0, k)
        .narrow_symint(dim, 0, split.sizes[k])
        .copy_(x.narrow_symint(dim, split.start(k), split.sizes[k]));
  return blocks;
}

Tensor concatenate(const Tensor& blocks, int64_t dim, const Split& split) {
  const int64_t p = static_cast<int64_t>(split.sizes.size());
  if (split.even()) {
    auto shape = blocks.sym_sizes().vec();
    shape.erase(shape.begin());
    shape[dim] = shape[dim] * p;
    return blocks.movedim(0, dim).reshape_symint(shape);
  }
  std::vector<Tensor> parts;
  for (int64_t k = 0; k < p; ++k)
    parts.push_back(blocks.select(0, k).narrow_symint(dim, 0, split.sizes[k]));
  return at::cat(parts, dim);
}

}  // namespace tp_ext::comm
