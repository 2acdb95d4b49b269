// Packing of shards on CPU, from the full tensor to the blocks of a collective and back
// (kernels/shard_pack.h): one read and one write, chunk by chunk.

#include <torch/library.h>

#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "args/shard_pack.h"
#include "cpu/dispatch.h"

namespace tp_ext {
namespace {

constexpr int64_t kTask = 1 << 16;  // bytes of a chunk worth a task of their own
constexpr int64_t kTile = 1 << 14;  // bytes of rows that stay in the cache from rank to rank

// Bytes of a result too large for a cache to keep for its reader, and of a chunk from which on
// partial cache lines do not matter
constexpr int64_t kStreamed = 8 << 20;
constexpr int64_t kStreamedChunk = 1024;

// Rows of W to 2 W bytes: their first W and their last W, which may overlap
template <int W>
inline void copy_ends(char* to, int64_t to_step, const char* from, int64_t from_step,
                      int64_t length, int64_t rows) {
  const int64_t last = length - W;
  for (int64_t r = 0; r < rows; ++r, to += to_step, from += from_step) {
    char ends[2 * W];
    std::memcpy(ends, from, W);
    std::memcpy(ends + W, from + last, W);
    std::memcpy(to, ends, W);
    std::memcpy(to + last, ends + W, W);
  }
}

// n >= 64: the last 64 may be copied twice
inline void copy_blocks(char* to, const char* from, int64_t n) {
  for (int64_t i = 0; i < n - 64; i += 64) std::memcpy(to + i, from + i, 64);
  std::memcpy(to + n - 64, from + n - 64, 64);
}

// Stores that bypass the cache: an ordinary store reads the line that it is about to overwrite. No
// line is written in both ways.
inline void stream(char* to, const char* from, int64_t n) {
#ifdef __SSE2__
  const int64_t head = -reinterpret_cast<intptr_t>(to) & 63;
  if (head) std::memcpy(to, from, head);
  int64_t i = head;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 64; j += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + j),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + j)));
  if (i < n) std::memcpy(to + i, from + i, n - i);
#else
  std::memcpy(to, from, n);
#endif
}

// A call of memcpy per row would cost more than a short row itself
TP_MULTIVERSION void copy_rows(char* to, int64_t to_step, const char* from, int64_t from_step,
                               int64_t n, int64_t rows, bool streamed) {
  if (n <= 0) return;
  if (n <= 2) return copy_ends<1>(to, to_step, from, from_step, n, rows);
  if (n <= 4) return copy_ends<2>(to, to_step, from, from_step, n, rows);
  if (n <= 8) return copy_ends<4>(to, to_step, from, from_step, n, rows);
  if (n <= 16) return copy_ends<8>(to, to_step, from, from_step, n, rows);
  if (n <= 32) return copy_ends<16>(to, to_step, from, from_step, n, rows);
  if (n <= 64) return copy_ends<32>(to, to_step, from, from_step, n, rows);
  streamed = streamed && n >= kStreamedChunk;
  for (int64_t r = 0; r < rows; ++r, to += to_step, from += from_step)
    streamed ? stream(to, from, n) : copy_blocks(to, from, n);
}

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
