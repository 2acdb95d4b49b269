// Packs tensors into the blocks that c10d moves: it requires one shape on all ranks, and ranks
// along dim 0; ours have uneven lengths along any dim.

#pragma once

#include <ATen/core/Tensor.h>
#include <vector>

#include "comm/split.h"

namespace tp_ext::comm {

at::Tensor fresh_contiguous(const at::Tensor& x);  // a copy, whatever the layout of x

// Shapes: that of x with n along dim; p of a shape stacked; whether it has no element
std::vector<c10::SymInt> with_dim(const at::Tensor& x, int64_t dim, const c10::SymInt& n);
std::vector<c10::SymInt> stacked(int64_t p, c10::SymIntArrayRef shape);
bool is_empty(const std::vector<c10::SymInt>& shape);

// x with zeros appended, n elements along dim; and the inverse, the first n elements
at::Tensor padded(const at::Tensor& x, int64_t dim, const c10::SymInt& n);
at::Tensor own_part(const at::Tensor& block, int64_t dim, const c10::SymInt& n);

// x split along dim into blocks [p, *longest], zeros after the shorter ones; and the inverse, the
// blocks concatenated along dim, each cut to its length. May be views where nothing moves.
at::Tensor blocks_of(const at::Tensor& x, int64_t dim, const Split& split);
at::Tensor concatenate(const at::Tensor& blocks, int64_t dim, const Split& split);

// The same without padding, the blocks of all ranks flat in one dim; shape: of the concatenation
at::Tensor flat_blocks_of(const at::Tensor& x, int64_t dim, const Split& split);
at::Tensor concatenate_flat(const at::Tensor& blocks, const std::vector<c10::SymInt>& shape,
                            int64_t dim, const Split& split);

}  // namespace tp_ext::comm
