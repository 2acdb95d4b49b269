// Fills a tensor with uniform or normal values that depend on the seed and the global index alone,
// on CPU. Every path goes through the same whole counters, so any slicing gives the same bits.

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "cpu/philox_words.h"
#include "cpu/simd.h"
#include "kernels/random_fill.h"
#include "ops.h"
#include "random_checks.h"

namespace tp_ext {
namespace {

TP_SIMD void draw_normals(const uint32_t* __restrict words, int64_t n, double* __restrict values) {
  for (int64_t j = 0; j < n; j += 2) {
    const NormalPair pair = unit_normals(words[j], words[j + 1]);
    values[j] = pair.even;
    values[j + 1] = pair.odd;
  }
}

template <typename T, bool kNormal>
TP_SIMD void fill_range(T* self, uint64_t seed, Affine affine, GlobalIndex index, int64_t begin,
                        int64_t end) {
  WordBuffer buffer;
  alignas(64) double values[kWordRun + 8];
  for (int64_t i = begin, n; i < end; i += n) {
    n = run_length(index, i, end);
    const uint64_t first = index(i);
    draw_words(seed, first, n, buffer);
    const int64_t skip = static_cast<int64_t>(first % 4), drawn = skip + n;
    const uint32_t* __restrict words = buffer.words;
    if constexpr (kNormal)
      draw_normals(words, drawn, values);
    else
      for (int64_t j = 0; j < drawn; ++j) values[j] = unit_uniform(words[j]);
    T* __restrict to = self + i;
    for (int64_t j = 0; j < n; ++j) to[j] = round_to<T>(affine(values[skip + j]));
  }
}

template <bool kNormal>
void fill(Tensor& self, const Tensor& seed, Affine affine, int64_t local_inner, int64_t full_inner,
          int64_t offset) {
  check_floating(self, "self");
  check_seed(seed, self, "self");
  const GlobalIndex index = check_global_index(self, "self", local_inner, full_inner, offset);
  const bool direct = self.is_contiguous();
  const Tensor to = direct ? self : at::empty_like(self, at::MemoryFormat::Contiguous);
  const auto key = static_cast<uint64_t>(*in<int64_t>(seed));
  dispatch_floating(self.scalar_type(), kNormal ? "_philox_normal_" : "_philox_uniform_",
                    [&](auto tag) {
                      using T = decltype(tag);
                      at::parallel_for(0, to.numel(), kGrain, [&](int64_t begin, int64_t end) {
                        fill_range<T, kNormal>(out<T>(to), key, affine, index, begin, end);
                      });
                    });
  if (!direct) self.copy_(to);
}

void philox_uniform_(Tensor& self, const Tensor& seed, double low, double high, int64_t local_inner,
                     int64_t full_inner, int64_t offset) {
  fill<false>(self, seed, {low, high - low}, local_inner, full_inner, offset);
}

void philox_normal_(Tensor& self, const Tensor& seed, double mean, double std, int64_t local_inner,
                    int64_t full_inner, int64_t offset) {
  fill<true>(self, seed, {mean, std}, local_inner, full_inner, offset);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  m.impl("_philox_uniform_", philox_uniform_);
  m.impl("_philox_normal_", philox_normal_);
}

}  // namespace tp_ext
