// Packing of shards on CPU, from the full tensor to the blocks of a collective and back
// (kernels/shard_pack.h): one read and one write, chunk by chunk.

#include <torch/library.h>

#include <cstring>

#include "args/shard_pack.h"
#include "cpu/copy_rows.h"
#include "cpu/dispatch.h"

namespace tp_ext {
namespace {

constexpr int64_t kTask = 1 << 16;  // bytes of a chunk worth a task of their own
constexpr int64_t kTile = 1 << 14;  // bytes of rows that stay in the cache from rank to rank

// Calls move(chunk, o, rows, begin, end) for byte ranges that cover all chunks: in parallel over
// rows and, for few rows, over ranges of a chunk. length(chunk): its bytes to cover.
template <typename Length, typename Move>
void for_each_chunk(const ShardPlan& plan, Length length, Move move) {
  int64_t longest = 0, row = 0;
  for (const auto& chunk : plan.chunks) {
    longest = std::max(longest, length(chunk));
    row += length(chunk);
  }
  if (row == 0) return;
  const int64_t tile = plan.outer < 64 ? 1 : std::max<int64_t>(1, kTile / row);
  const int64_t tiles = (plan.outer + tile - 1) / tile;
  const int64_t task = plan.outer < 64 ? kTask : longest, tasks = (longest + task - 1) / task;
  const int64_t grain = std::max<int64_t>(1, 2 * kTask * tasks / (row * tile));
  at::parallel_for(0, tiles * tasks, grain, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t o = item / tasks * tile, begin = item % tasks * task;
      const int64_t rows = std::min(tile, plan.outer - o);
      for (const auto& chunk : plan.chunks) {
        const int64_t end = std::min(length(chunk), begin + task);
        if (begin < end) move(chunk, o, rows, begin, end);
      }
    }
  });
}

bool is_streamed(const Tensor& result) {
  return static_cast<int64_t>(result.nbytes()) >= kStreamed;
}

struct CpuShards {
  static constexpr int64_t kWidest = 1;

  static void unpack(const Tensor& from, const Tensor& to, const ShardPlan& plan) {
    const auto blocks = static_cast<const char*>(from.const_data_ptr());
    const auto full = static_cast<char*>(to.mutable_data_ptr());
    const bool streamed = is_streamed(to);
    for_each_chunk(
        plan, [](const ShardChunk& chunk) { return chunk.length; },
        [&](const ShardChunk& chunk, int64_t o, int64_t rows, int64_t begin, int64_t end) {
          copy_rows(full + o * plan.full_row + chunk.full_start + begin, plan.full_row,
                    blocks + chunk.block_start + o * chunk.block_row + begin, chunk.block_row,
                    end - begin, rows, streamed);
        });
  }

  static void pack(const Tensor& from, const Tensor& to, const ShardPlan& plan) {
    const auto full = static_cast<const char*>(from.const_data_ptr());
    const auto blocks = static_cast<char*>(to.mutable_data_ptr());
    const bool streamed = is_streamed(to);
    for_each_chunk(
        plan, [](const ShardChunk& chunk) { return chunk.block_row; },
        [&](const ShardChunk& chunk, int64_t o, int64_t rows, int64_t begin, int64_t end) {
          char* const block = blocks + chunk.block_start + o * chunk.block_row;
          const int64_t held = std::clamp(chunk.length, begin, end);
          copy_rows(block + begin, chunk.block_row,
                    full + o * plan.full_row + chunk.full_start + begin, plan.full_row,
                    held - begin, rows, streamed);
          if (held < end)
            for (int64_t r = 0; r < rows; ++r)
              std::memset(block + r * chunk.block_row + held, 0, end - held);
        });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  using Primitives = ShardPrimitives<CpuShards>;
  m.impl("_unpack_shards", Primitives::unpack);
  m.impl("_pack_shards", Primitives::pack);
}

}  // namespace tp_ext
