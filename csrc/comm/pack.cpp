#include "comm/pack.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/movedim.h>
#include <ATen/ops/zeros.h>

#include "comm/collectives.h"
#include "operators.h"

namespace tp_ext::comm {

using at::Tensor;
using c10::SymInt;

namespace {

// Whether the primitives move the shards of x, in one pass. Traced calls use ATen operators
// instead: torch.compile fuses those with their neighbours, but not an opaque one. So do devices
// that the library was not built for.
bool by_primitives(const Tensor& x) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tp_ext::_pack_shards", "");
  return !traced(x) &&
         (x.is_cpu() || (x.is_cuda() && op.hasKernelForDispatchKey(c10::DispatchKey::CUDA)));
}

Tensor pack(const Tensor& x, int64_t dim, const Split& split, bool padded) {
  static const auto op = TP_OP(_pack_shards);
  at::AutoDispatchBelowADInplaceOrView below;
  return op.call(x, dim, split.sizes, padded);
}

Tensor unpack(const Tensor& blocks, int64_t dim, const Split& split, Sizes shape) {
  static const auto op = TP_OP(_unpack_shards);
  at::AutoDispatchBelowADInplaceOrView below;
  return op.call(blocks, dim, split.sizes, shape);
}

SymInt product(c10::SymIntArrayRef shape) {
  SymInt n = 1;
  for (const auto& size : shape) n = n * size;
  return n;
}

// Whether a contiguous tensor already holds the shards one after the other
bool outermost(c10::SymIntArrayRef shape, int64_t dim) { return product(shape.slice(0, dim)) == 1; }

}  // namespace

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
  // Zeros with the data copied in: with an empty tensor and two copies, inductor's partitioner
  // moves gathers of the backward into the forward, only on the ranks that pad
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
  const bool even = split.even();
  if (by_primitives(x) && !(even && x.is_contiguous() && outermost(x.sym_sizes(), dim)))
    return pack(x, dim, split, true);
  if (even) {
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
  const bool even = split.even();
  if (by_primitives(blocks) && !(even && outermost(blocks.sym_sizes().slice(1), dim)))
    return unpack(blocks, dim, split, std::nullopt);
  if (even) {
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

Tensor flat_blocks_of(const Tensor& x, int64_t dim, const Split& split) {
  if (by_primitives(x))
    return x.is_contiguous() && outermost(x.sym_sizes(), dim) ? x.view(-1)
                                                              : pack(x, dim, split, false);
  std::vector<Tensor> blocks;
  for (size_t k = 0; k < split.sizes.size(); ++k)
    blocks.push_back(x.narrow_symint(dim, split.start(k), split.sizes[k]).reshape({-1}));
  return at::cat(blocks);
}

Tensor concatenate_flat(const Tensor& blocks, const std::vector<SymInt>& shape, int64_t dim,
                        const Split& split) {
  if (by_primitives(blocks))
    return outermost(shape, dim) ? blocks.view_symint(shape)
                                 : unpack(blocks, dim, split, c10::SymIntArrayRef(shape));
  std::vector<Tensor> parts;
  SymInt at = 0;
  for (const auto& n : split.sizes) {
    auto part = shape;
    part[dim] = n;
    const auto numel = product(part);
    parts.push_back(blocks.narrow_symint(0, at, numel).reshape_symint(part));
    at = at + numel;
  }
  return at::cat(parts, dim);
}

}  // namespace tp_ext::comm
