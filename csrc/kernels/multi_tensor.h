// Many tensors in one pass: the tensor and the chunk of a block, and the operations on it.
//
// Every tensor is split into chunks of kTensorChunk elements from its start, so that the order of
// the additions depends on the lengths alone: neither on addresses nor on the number of threads.
//
// Squares are computed and summed in fp64. There is no scaling as in BLAS's nrm2: squares of fp32
// and of half types neither overflow nor underflow in fp64 (1e38^2 times 1e30 elements is 1e106),
// and they are exact, so that only the sum rounds. fp64 itself overflows and underflows where its
// squares do, as torch's norm does.

#pragma once

#include "scalar.h"

namespace tp_ext {

constexpr int64_t kTensorChunk = 16384;

TP_HD int64_t chunks_of_tensor(int64_t n) { return (n + kTensorChunk - 1) / kTensorChunk; }

// Tensors of one launch, all of one dtype: passed as a kernel argument of at most 4 KB, so that
// nothing is copied to the device and a captured graph holds them
constexpr int kListTensors = 180;
struct TensorList {
  void* data[kListTensors];
  int64_t numel[kListTensors];
  int32_t first_chunk[kListTensors + 1];  // last entry: number of all chunks
  int32_t count;
};
static_assert(sizeof(TensorList) <= 3968, "kernel arguments are 4 KB");

struct TensorChunk {
  int tensor;
  int64_t start, length;
};
TP_HD TensorChunk chunk_at(const TensorList& list, int32_t chunk) {
  int low = 0, high = list.count;  // first_chunk[low] <= chunk < first_chunk[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (list.first_chunk[middle] <= chunk)
      low = middle;
    else
      high = middle;
  }
  const int64_t start = (chunk - list.first_chunk[low]) * kTensorChunk;
  const int64_t left = list.numel[low] - start;
  return {low, start, left < kTensorChunk ? left : kTensorChunk};
}

template <typename T>
TP_HD double squared(T x) {
  const double value = static_cast<double>(to_acc(x));
  return value * value;
}

template <typename T>
TP_HD T scaled(T x, acc_t<T> scale) {
  return from_acc<T>(to_acc(x) * scale);
}

}  // namespace tp_ext
