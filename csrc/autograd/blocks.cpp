#include "autograd/blocks.h"

#include <omp.h>

#include "autograd/linear_overlap.h"
#include "operators.h"

// MKL's own function, which torch's library exports where it contains MKL
extern "C" int MKL_Set_Num_Threads_Local(int threads) __attribute__((weak));

namespace tp_ext {

std::vector<Segment> segments_of(at::IntArrayRef flat) {
  TORCH_CHECK_VALUE(flat.size() % 3 == 0, "segments: ", flat.size(),
                    " numbers must be triples of block, start and length");
  std::vector<Segment> segments;
  for (size_t i = 0; i < flat.size(); i += 3)
    segments.push_back({flat[i], flat[i + 1], flat[i + 2]});
  return segments;
}

comm::Blocks own_blocks(at::IntArrayRef of_ranks, const std::string& group) {
  const int64_t p = comm::size(group);
  TORCH_CHECK_VALUE(static_cast<int64_t>(of_ranks.size()) == p, "blocks: ", of_ranks,
                    " must be the number of blocks of each of ", p, " ranks");
  return comm::blocks_of(of_ranks.vec(), comm::rank(group));
}

Tensor row_major(const Tensor& x) {
  if (comm::traced(x)) return x.contiguous();
  const int64_t d = x.dim();
  return x.is_contiguous() && x.stride(d - 1) == 1 && x.stride(d - 2) == x.size(d - 1)
             ? x
             : x.clone(at::MemoryFormat::Contiguous);
}

OneThread::OneThread()
    : mkl_(MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 0),
      omp_(omp_get_max_threads()) {
  omp_set_num_threads(1);
}
OneThread::~OneThread() {
  if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(mkl_);
  omp_set_num_threads(omp_);
}

Tensor column_sums(const Tensor& rows, const std::vector<Segment>& segments) {
  std::vector<int64_t> lengths;
  for (const auto& segment : segments) lengths.push_back(segment.length);
  static const auto op = TP_OP(_column_sums);
  return op.call(rows, lengths);
}

comm::TreeSum token_sums(const Tensor& x, const comm::Blocks& blocks, const c10::SymInt& total) {
  const auto origin = comm::block_start(total, blocks.first, blocks.number);
  comm::TreeSum tree(blocks, x.new_empty_symint({0, x.sym_size(-1)}));
  for (int64_t b = blocks.first; b < blocks.first + blocks.count; ++b) {
    const auto begin = comm::block_start(total, b, blocks.number),
               end = comm::block_start(total, b + 1, blocks.number);
    const Tensor rows = as_rows(x.narrow_symint(0, begin - origin, end - begin));
    const auto n = rows.sym_size(1).guard_int(__FILE__, __LINE__);
    tree.add(column_sums(rows, {{0, 0, n}}));
  }
  return tree;
}

}  // namespace tp_ext
