// Shards packed and unpacked.

#include "harness.h"

#include "kernels/shard_pack.cuh"

using namespace emulation;
using namespace tp_ext;

namespace emulation::shards {

// A byte string of the unit's size that encodes its origin
template <typename U>
U unit_of(uint64_t number) {
  U unit;
  std::memset(&unit, 0, sizeof unit);
  number = number * 0x9e3779b97f4a7c15ull >> 7;
  std::memcpy(&unit, &number, std::min(sizeof unit, sizeof number));
  return unit;
}

struct Case {
  int64_t outer;
  std::vector<int64_t> lengths;  // of the ranks' chunks
  bool padded;
  int64_t gap;  // unused units of full between two rows
};

template <typename U>
void pack(const Case& c) {
  ShardChunks chunks{};
  int64_t row = 0, block = 0;
  const int64_t longest = *std::max_element(c.lengths.begin(), c.lengths.end());
  for (size_t k = 0; k < c.lengths.size(); ++k) {
    const int64_t length = c.lengths[k], kept = c.padded ? longest : length;
    chunks.of[k] = {length, row, block, kept};
    row += length, block += c.outer * kept;
  }
  const auto ranks = static_cast<unsigned>(c.lengths.size());
  const int64_t full_row = row + c.gap;
  Tensor<U> full(c.outer ? (c.outer - 1) * full_row + row : 0), want(block);
  for (int64_t i = 0; i < full.size(); ++i) full[i] = unit_of<U>(i + 1);
  for (const ShardChunk& chunk : std::vector<ShardChunk>(chunks.of, chunks.of + ranks))
    for (int64_t o = 0; o < c.outer; ++o)
      for (int64_t j = 0; j < chunk.block_row; ++j)
        want[chunk.block_start + o * chunk.block_row + j] =
            j < chunk.length ? full[o * full_row + chunk.full_start + j] : unit_of<U>(0);
  const auto name = "shards of " + std::to_string(sizeof(U)) + " bytes, " +
                    std::to_string(c.outer) + " rows of " + std::to_string(row) + " + " +
                    std::to_string(c.gap) + (c.padded ? ", padded" : "");
  const dim3 grid(std::min(grid_for(c.outer * longest), 2), ranks);
  const auto [blocks, back] = run_in_every_order(name, [&] {
    Tensor<U> blocks(block), back(full.size());
    launch(grid, kThreads, [&] { pack_shards_kernel<U>(full, blocks, c.outer, full_row, chunks); });
    launch(grid, kThreads,
           [&] { unpack_shards_kernel<U>(blocks, back, c.outer, full_row, chunks); });
    return results(blocks, back);
  });
  for (int64_t i = 0; i < block; ++i)
    if (std::memcmp(&blocks[i], &want[i], sizeof(U)) != 0) wrong("blocks");
  const std::vector<unsigned char> untouched(sizeof(U), 0xff);
  for (int64_t i = 0; i < full.size(); ++i) {
    const bool gap = i % full_row >= row;
    if (std::memcmp(&back[i], gap ? static_cast<const void*>(untouched.data()) : &full[i],
                    sizeof(U)) != 0)
      wrong("there and back");
  }
}

template <typename U>
void sizes() {
  pack<U>({3, {5, 4, 4}, false, 0}), pack<U>({3, {5, 4, 4}, true, 0});
  pack<U>({1, {1}, false, 0}), pack<U>({300, {3, 0, 5}, true, 2}), pack<U>({2, {700, 1}, false, 1});
}

// The last row's last chunk, both beyond 2^31 units of a byte
void vast_pack() {
  const int64_t row = 4096, outer = (int64_t{1} << 31) / row + 7, size = outer * row;
  current_case = "shards of more than 2^31 units";
  ++cases;
  auto *const full = vast<uint8_t>(size), *const blocks = vast<uint8_t>(size),
              *const back = vast<uint8_t>(size);
  ShardChunks chunks{};
  chunks.of[0] = {row / 2, 0, 0, row / 2};
  chunks.of[1] = {row / 2, row / 2, outer * row / 2, row / 2};
  full[size - 1] = 77;
  const int64_t items = outer * row / 2;
  const dim3 grid(grid_for(items), 2);
  const dim3 last(static_cast<unsigned>((items - 1) / kThreads % grid.x), 1);
  launch(grid, kThreads, [&] { pack_shards_kernel(full, blocks, outer, row, chunks); }, 0, {last});
  launch(grid, kThreads, [&] { unpack_shards_kernel(blocks, back, outer, row, chunks); }, 0,
         {last});
  if (blocks[size - 1] != 77 || back[size - 1] != 77) wrong("the last unit");
  unmap(full, size), unmap(blocks, size), unmap(back, size);
}

int program(int, char**) {
  sizes<uint4>(), sizes<uint2>(), sizes<uint32_t>(), sizes<uint8_t>();
  vast_pack();
  return done();
}

}  // namespace emulation::shards
