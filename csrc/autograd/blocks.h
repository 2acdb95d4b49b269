// Work on the blocks of tp_ext.tp_invariant, whose results do not depend on the number of ranks or
// of threads [Note: one tree of blocks].

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>

#include <string>
#include <vector>

#include "comm/tree_sum.h"
#include "types.h"

namespace tp_ext {

// Elements [start, start + length) of a local dim: of one part (q, k, v, gate, up) and one block.
// Block -1: copies, whose sums another rank counts.
struct Segment {
  int64_t block, start, length;
};
std::vector<Segment> segments_of(at::IntArrayRef flat);

// This rank's blocks, given how many each rank has
comm::Blocks own_blocks(at::IntArrayRef of_ranks, const std::string& group);

// n rounded up to whole groups of rows. A product of that many rows gives each row the same bits
// whatever the others are; of fewer, or in the remainder, another kernel of MKL may round otherwise
// [Note: rows that depend on themselves].
inline int64_t whole_rows(int64_t n) { return (n + 15) / 16 * 16; }

// Row by row in memory: a product has other bits where an operand is transposed in memory, and
// whether a view is depends on how many heads or blocks a rank has. A stride of a dim of length 1
// chooses MKL's form, too; a copy has the strides of its sizes [Note: one tree of blocks].
Tensor row_major(const Tensor& x);

// A scope in which MKL and OpenMP compute on one thread in this thread: products then have the same
// bits for every number of threads
class OneThread {
 public:
  OneThread();
  ~OneThread();
  OneThread(const OneThread&) = delete;

 private:
  int mkl_, omp_;
};

// Calls f(i) for i in [0, n): on the CPU several at a time, each on one thread
template <typename F>
void for_each_block(const Tensor& like, int64_t n, const F& f) {
  if (!like.is_cpu() || comm::traced(like)) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
  const at::ThreadLocalState state;
  at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
    const at::ThreadLocalStateGuard same(state);
    const OneThread alone;
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

// Adds leaf(i) of this rank's blocks i = 0, 1, .. to a tree; as many of them exist at a time as
// there are threads. none: as that of TreeSum.
template <typename F>
comm::TreeSum sum_of_blocks(const Tensor& like, const comm::Blocks& blocks, const Tensor& none,
                            const F& leaf) {
  comm::TreeSum tree(blocks, none);
  const int64_t wave = like.is_cpu() ? at::get_num_threads() : 1;
  std::vector<Tensor> leaves(wave);
  for (int64_t first = 0; first < blocks.count; first += wave) {
    const int64_t n = std::min(wave, blocks.count - first);
    for_each_block(like, n, [&](int64_t i) { leaves[i] = leaf(first + i); });
    for (int64_t i = 0; i < n; ++i) tree.add(std::exchange(leaves[i], Tensor()));
  }
  return tree;
}

// The sums of the columns of a matrix, each in the order of its rows, in node_dtype; those of a
// segment do not depend on the other columns
Tensor column_sums(const Tensor& rows, const std::vector<Segment>& segments);

// The same for each block of dim 0 of x [tokens, .., n] as a tree: this rank has the tokens of its
// blocks, out of `total`
comm::TreeSum token_sums(const Tensor& x, const comm::Blocks& blocks, const c10::SymInt& total);

}  // namespace tp_ext
