// Fills a tensor with random values that depend only on the seed and the global index, on CPU.
// Every path uses the same whole counters, so any slicing gives the same bits.

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "args/random_fill.h"
#include "cpu/dispatch.h"
#include "cpu/philox_words.h"
#include "types.h"

namespace tp_ext {
namespace {

template <typename Draw>
TP_MULTIVERSION void draw_values(Draw draw, const uint32_t* __restrict words, int64_t n,
                                 double* __restrict values) {
  if constexpr (Draw::kPairs)
    for (int64_t j = 0; j < n; j += 2) {
      const ValuePair pair = draw(words[j], words[j + 1]);
      values[j] = pair.even;
      values[j + 1] = pair.odd;
    }
  else
    for (int64_t j = 0; j < n; ++j) values[j] = draw(words[j]);
}

template <typename T>
TP_MULTIVERSION void round_values(const double* __restrict values, T* __restrict to, int64_t n) {
  for (int64_t j = 0; j < n; ++j) to[j] = round_to<T>(values[j]);
}

template <typename T, typename Draw>
void fill_range(T* self, const PhiloxKeys& keys, Draw draw, const GlobalIndex& index, int64_t begin,
                int64_t end) {
  WordBuffer buffer;
  alignas(64) double values[kWordChunk];
  for_each_chunk(index, begin, end, kWordChunk, [&](int64_t i, uint64_t first, int64_t n) {
    draw_words(keys, first / 4, counters_over(first, n, 4), buffer);
    const int64_t skip = static_cast<int64_t>(first % 4);
    draw_values(draw, buffer.words, skip + n, values);
    round_values(values + skip, self + i, n);
  });
}

struct Fill {
  template <typename Draw>
  void operator()(Tensor& self, const Tensor& seed, Draw draw, const char* op, int64_t local_inner,
                  int64_t full_inner, int64_t offset) const {
    check_seed(seed, self, "self");
    const GlobalIndex index = check_global_index(self, "self", local_inner, full_inner, offset);
    const bool direct = self.is_contiguous();
    const Tensor to = direct ? self : at::empty_like(self, at::MemoryFormat::Contiguous);
    const PhiloxKeys keys(static_cast<uint64_t>(*in<int64_t>(seed)));
    dispatch_floating(self.scalar_type(), op, [&](auto tag) {
      using T = decltype(tag);
      at::parallel_for(0, to.numel(), kGrain, [&](int64_t begin, int64_t end) {
        fill_range<T>(out<T>(to), keys, draw, index, begin, end);
      });
    });
    if (!direct) self.copy_(to);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  using Primitives = RandomFillPrimitives<Fill>;
  m.impl("_philox_uniform_", Primitives::philox_uniform_);
  m.impl("_philox_normal_", Primitives::philox_normal_);
  m.impl("_philox_truncated_normal_", Primitives::philox_truncated_normal_);
}

}  // namespace tp_ext
