// The rotary embedding.

#include "harness.h"

#include "kernels/rope.cuh"

using namespace emulation;
using namespace tp_ext;

namespace {

template <typename T, int N>
dim3 block_for(const RopeShape& s) {
  const int64_t work = s.heads * ((s.head_dim - s.half) / N), whole = (work + 31) / 32 * 32;
  const auto width = static_cast<unsigned>(whole < kThreads ? whole : kThreads);
  return dim3(width, kThreads / width);
}

template <typename T, int N, bool kInterleaved>
void turn(const RopeShape& s, int64_t shift, unsigned blocks) {
  using A = acc_t<T>;
  const auto x = values<T>(s.tokens * s.token_stride, shift, 1);
  const auto cos = values<A>(s.tokens * s.half, 0, 2, -1, 1),
             sin = values<A>(s.tokens * s.half, 0, 3, -1, 1);
  for (const A sign : {A(1), A(-1)}) {
    Tensor<T> want(s.tokens * s.heads * s.head_dim);
    for (int64_t t = 0; t < s.tokens; ++t)
      for (int64_t h = 0; h < s.heads; ++h) {
        const T* const from = x + t * s.token_stride + h * s.head_dim;
        T* const to = want + (t * s.heads + h) * s.head_dim;
        std::copy(from, from + s.head_dim, to);
        for (int64_t i = 0; i < s.half; ++i) {
          const int64_t a = kInterleaved ? 2 * i : i, b = kInterleaved ? 2 * i + 1 : i + s.half;
          const auto turned = rotate(to_acc(from[a]), to_acc(from[b]), cos[t * s.half + i],
                                     sign * sin[t * s.half + i]);
          to[a] = from_acc<T>(turned.first), to[b] = from_acc<T>(turned.second);
        }
      }
    const auto name = std::string("rope ") + type_name<T>() + " " + std::to_string(s.tokens) +
                      " x " + std::to_string(s.heads) + " x " + std::to_string(s.head_dim) +
                      " half " + std::to_string(s.half) + " shift " + std::to_string(shift) +
                      " N " + std::to_string(N) + (kInterleaved ? " interleaved" : "");
    const auto [y] = run_in_every_order(name, [&] {
      Tensor<T> y(want.size(), shift);
      const dim3 block = block_for<T, N>(s);
      const unsigned grid = grid_for(s.tokens, block.y);
      launch(grid < blocks ? grid : blocks, block,
             [&] { rope_kernel<T, N, kInterleaved>(x, cos, sin, y, s, sign); });
      return results(y);
    });
    expect_equal("y", y, want);
  }
}

template <typename T>
void rope(const RopeShape& s, int64_t shift, unsigned blocks = 1000) {
  const auto x = values<T>(1, shift);
  const Tensor<acc_t<T>> angle(1);
  turn<T, 1, false>(s, shift, blocks);
  turn<T, 1, true>(s, shift, blocks);
  const bool whole =
      s.half % kVec<T> == 0 && s.head_dim % kVec<T> == 0 && s.token_stride % kVec<T> == 0;
  const bool vectors = rope_vectorisable<T>(x, angle, angle, x, s);
  if (vectors != (whole && shift * sizeof(T) % kVecBytes == 0)) wrong("the choice of vectors");
  if (!vectors) return;
  turn<T, kVec<T>, false>(s, shift, blocks);
  turn<T, kVec<T>, true>(s, shift, blocks);
}

// The last token of a tensor of more than 2^31 elements
void vast_rope() {
  using T = BFloat16;
  constexpr int N = kVec<T>;
  const RopeShape s{(int64_t{1} << 31) / 4096 + 9, 32, 128, 64, 4096};
  current_case = "rope over more than 2^31 elements";
  ++cases;
  const int64_t size = s.tokens * s.token_stride, row = (s.tokens - 1) * s.token_stride;
  T *const x = vast<T>(size), *const y = vast<T>(size);
  float *const cos = vast<float>(s.tokens * s.half), *const sin = vast<float>(s.tokens * s.half);
  for (int64_t i = 0; i < s.token_stride; ++i) x[row + i] = T(static_cast<float>(i));
  for (int64_t i = (s.tokens - 1) * s.half; i < s.tokens * s.half; ++i) sin[i] = 1;  // a quarter
  const dim3 block = block_for<T, N>(s);
  const unsigned grid = static_cast<unsigned>((s.tokens + block.y - 1) / block.y);
  launch(grid, block, [&] { rope_kernel<T, N, false>(x, cos, sin, y, s, 1.f); }, 0,
         {dim3(grid - 1, 0)});
  for (int64_t h = 0; h < s.heads; ++h)
    for (int64_t i = 0; i < s.half; ++i) {
      const int64_t a = row + h * s.head_dim + i, b = a + s.half;
      if (as_double(y[a]) != -as_double(x[b]) || y[b].bits != x[a].bits) wrong("the last token");
    }
  unmap(x, size), unmap(y, size), unmap(cos, s.tokens * s.half), unmap(sin, s.tokens * s.half);
}

}  // namespace

int main() {
  for_all_types([](auto type) {
    using T = decltype(type);
    constexpr int64_t N = kVec<T>;
    for (const int64_t shift : {int64_t{0}, N, int64_t{1}}) {
      rope<T>({3, 2, 4 * N, 2 * N, 8 * N}, shift);      // all of it turns
      rope<T>({2, 3, 4 * N, N, 3 * 4 * N + 1}, shift);  // half of it, tokens at odd addresses
    }
    rope<T>({5, 3, 6, 2, 20}, 0);
    rope<T>({3, 2, 5, 0, 10}, 0);
  });
  rope<BFloat16>({40, 5, 128, 64, 640}, 0, 2);  // more work than threads, more tokens than blocks
  rope<BFloat16>({40, 1, 32, 8, 32}, 0, 2);     // several tokens in a block
  vast_rope();
  return done();
}
