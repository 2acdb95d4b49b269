// moe_sort on CUDA: what comes before and after the launcher's stable sort of the slots by expert.

#pragma once

#include "vec.cuh"

namespace tp_ext {

// The expert of each slot; num_experts for slots without one, which sorts them to the end.
// in_range(ok) asserts.
template <typename InRange>
__global__ void moe_keys_kernel(const int64_t* __restrict__ experts, int64_t slots,
                                int64_t num_experts, int32_t* __restrict__ keys, InRange in_range) {
  grid_stride(slots, 1, [&](int64_t slot) {
    const int64_t expert = experts[slot];
    in_range(expert >= -1 && expert < num_experts);
    keys[slot] = static_cast<int32_t>(expert < 0 ? num_experts : expert);
  });
}

// The first of n sorted keys that is not less than key
__device__ __forceinline__ int64_t first_at_least(const int32_t* keys, int64_t n, int64_t key) {
  int64_t low = 0, high = n;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (keys[middle] < key)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Of sorted keys and their slots: the row of each slot, and the number of rows of each expert
__global__ void moe_rows_kernel(const int32_t* __restrict__ keys,
                                const int64_t* __restrict__ slot_of, int64_t slots,
                                int64_t num_experts, int64_t* __restrict__ rows,
                                int64_t* __restrict__ counts) {
  grid_stride(slots > num_experts ? slots : num_experts, 1, [&](int64_t i) {
    if (i < slots) rows[slot_of[i]] = keys[i] < num_experts ? i : -1;
    if (i < num_experts)
      counts[i] = first_at_least(keys, slots, i + 1) - first_at_least(keys, slots, i);
  });
}

}  // namespace tp_ext
