// The rotary embedding.

#include "harness.h"

#include "kernels/rope.cuh"

using namespace emulation;
using namespace tp_ext;

namespace emulation::rope {

struct InRange {
  void operator()(bool ok) const {
    if (!ok) wrong("a position out of range");
  }
};

// How a tensor [batch, seq, heads, head_dim] lies in memory
RopeShape packed(int64_t batch, int64_t seq, int64_t heads, int64_t head_dim, int64_t half) {
  const int64_t head = head_dim, token = heads * head, sequence = seq * token;
  return {batch * seq, seq, heads, head_dim, half, seq, sequence, token, head};
}

inline int turns = 0;

template <typename T, int N, bool kInterleaved>
void turn(const RopeShape& s, int64_t shift, unsigned blocks, bool by_position) {
  using A = acc_t<T>;
  const int64_t batch = s.tokens / s.seq;
  // Ends with the last element, so that the sanitizer finds accesses past it
  const auto x = values<T>((batch - 1) * s.batch_stride + (s.seq - 1) * s.token_stride +
                               (s.heads - 1) * s.head_stride + s.head_dim,
                           shift, 1);
  const auto cos = values<A>(s.rows * s.half, 0, 2, -1, 1),
             sin = values<A>(s.rows * s.half, 0, 3, -1, 1);
  Tensor<int64_t> positions(by_position ? s.tokens : 0);
  for (int64_t t = 0; t < positions.size(); ++t) positions[t] = (5 * t + 1) % s.rows;
  const int64_t* const given = by_position ? positions.data() : nullptr;
  for (const A sign : {A(1), A(-1)}) {
    Tensor<T> want(s.tokens * s.heads * s.head_dim);
    for (int64_t t = 0; t < s.tokens; ++t)
      for (int64_t h = 0; h < s.heads; ++h) {
        const T* const from =
            x + t / s.seq * s.batch_stride + t % s.seq * s.token_stride + h * s.head_stride;
        T* const to = want + (t * s.heads + h) * s.head_dim;
        const int64_t row = (by_position ? positions[t] : t % s.seq) * s.half;
        std::copy(from, from + s.head_dim, to);
        for (int64_t i = 0; i < s.half; ++i) {
          const int64_t a = kInterleaved ? 2 * i : i, b = kInterleaved ? 2 * i + 1 : i + s.half;
          const auto rotated =
              rotate(to_acc(from[a]), to_acc(from[b]), cos[row + i], sign * sin[row + i]);
          to[a] = from_acc<T>(rotated.first), to[b] = from_acc<T>(rotated.second);
        }
      }
    const auto name = std::string("rope ") + type_name<T>() + " " + std::to_string(s.tokens) +
                      " x " + std::to_string(s.heads) + " x " + std::to_string(s.head_dim) +
                      " half " + std::to_string(s.half) + " shift " + std::to_string(shift) +
                      " N " + std::to_string(N) + (kInterleaved ? " interleaved" : "");
    const auto [y] = run_in_every_order(name, [&] {
      Tensor<T> y(want.size(), shift);
      const int threads[] = {0, 32, 64, 300};  // by the rule, and by choices, of which one is none
      const RopeLaunch by =
          rope_launch<N>(s, {0, threads[turns++ % 4], 0, static_cast<int>(blocks)});
      launch(by.blocks, dim3(by.threads, by.tokens), [&] {
        rope_kernel<T, N, kInterleaved>(x.data(), cos.data(), sin.data(), given, y.data(), s, sign,
                                        InRange());
      });
      return results(y);
    });
    expect_equal("y", y, want);
  }
}

template <typename T>
void rope(const RopeShape& s, int64_t shift, unsigned blocks = 1000) {
  const auto x = values<T>(1, shift);
  const Tensor<acc_t<T>> angle(1);
  turn<T, 1, false>(s, shift, blocks, false);
  turn<T, 1, true>(s, shift, blocks, true);
  bool whole = shift * sizeof(T) % kVecBytes == 0;
  for (const int64_t n : {s.half, s.head_dim, s.batch_stride, s.token_stride, s.head_stride})
    whole = whole && n % kVec<T> == 0;
  const bool vectors = rope_vectorisable<T>(x, angle, angle, x, s);
  if (vectors != whole) wrong("the choice of vectors");
  if (!vectors) return;
  turn<T, kVec<T>, false>(s, shift, blocks, true);
  turn<T, kVec<T>, true>(s, shift, blocks, false);
}

template <typename A, typename P, typename Frequency>
void tables(int64_t rows, int64_t half, const Frequency& frequency, double amplitude) {
  const auto name = "rope tables of " + std::to_string(rows) + " x " + std::to_string(half);
  Tensor<P> positions(rows);
  for (int64_t r = 0; r < rows; ++r) positions[r] = P(3 * r + 7) / P(2);
  const auto [cos, sin] = run_in_every_order(name, [&] {
    Tensor<A> cos(rows * half), sin(rows * half);
    launch(std::min(grid_for(rows * half), 2), kThreads, [&] {
      rope_tables_kernel<A, P>(positions, rows, half, frequency, amplitude, cos, sin);
    });
    return results(cos, sin);
  });
  const auto angle = [&](int64_t i) {
    return static_cast<double>(positions[i / half]) * frequency(i % half);
  };
  const auto bound = [](int64_t) { return 1e-14; };
  const auto& c = cos;  // a structured binding cannot be captured
  expect_near<A>(
      "cos", c, [&](int64_t i) { return amplitude * std::cos(angle(i)); }, bound);
  expect_near<A>(
      "sin", sin, [&](int64_t i) { return amplitude * std::sin(angle(i)); }, bound);
}

// The last token of a tensor of more than 2^31 elements
void vast_rope() {
  using T = BFloat16;
  constexpr int N = kVec<T>;
  const RopeShape s = packed(1, (int64_t{1} << 31) / 4096 + 9, 32, 128, 64);
  current_case = "rope over more than 2^31 elements";
  ++cases;
  const int64_t size = s.tokens * s.token_stride, row = (s.tokens - 1) * s.token_stride;
  T *const x = vast<T>(size), *const y = vast<T>(size);
  float *const cos = vast<float>(s.tokens * s.half), *const sin = vast<float>(s.tokens * s.half);
  for (int64_t i = 0; i < s.token_stride; ++i) x[row + i] = T(static_cast<float>(i));
  for (int64_t i = (s.tokens - 1) * s.half; i < s.tokens * s.half; ++i) sin[i] = 1;  // a quarter
  const RopeLaunch by = rope_launch<N>(s, {});
  const dim3 block(by.threads, by.tokens);
  const unsigned grid = static_cast<unsigned>((s.tokens + block.y - 1) / block.y);
  launch(grid, block, [&] { rope_kernel<T, N, false>(x, cos, sin, nullptr, y, s, 1.f, InRange()); },
         0, {dim3(grid - 1, 0)});
  for (int64_t h = 0; h < s.heads; ++h)
    for (int64_t i = 0; i < s.half; ++i) {
      const int64_t a = row + h * s.head_dim + i, b = a + s.half;
      if (as_double(y[a]) != -as_double(x[b]) || y[b].bits != x[a].bits) wrong("the last token");
    }
  unmap(x, size), unmap(y, size), unmap(cos, s.tokens * s.half), unmap(sin, s.tokens * s.half);
}

int program(int, char**) {
  for_all_types([](auto type) {
    using T = decltype(type);
    constexpr int64_t N = kVec<T>;
    for (const int64_t shift : {int64_t{0}, N, int64_t{1}}) {
      rope<T>(packed(2, 3, 2, 4 * N, 2 * N), shift);  // all elements rotate
      RopeShape s = packed(2, 2, 3, 4 * N, N);        // half of them
      s.token_stride *= 3;                            // q of a fused q, k, v
      s.batch_stride = 2 * s.token_stride + 1;        // sequences at odd addresses
      rope<T>(s, shift);
      s.batch_stride -= 1;
      s.head_stride = 8 * N, s.token_stride = 4 * N;  // heads before tokens
      rope<T>(s, shift);
    }
    rope<T>(packed(1, 5, 3, 6, 2), 0);
    rope<T>(packed(1, 3, 2, 5, 0), 0);
  });
  rope<BFloat16>(packed(4, 10, 5, 128, 64), 0, 2);  // more work than threads, tokens than blocks
  rope<BFloat16>(packed(1, 40, 1, 32, 8), 0, 2);    // several tokens in a block
  tables<float, int64_t>(3, 5, RopeSeries{10000.0, 5}, 1.0);
  tables<double, double>(40, 32, RopeSeries{10000.0, 32}, 1.0);
  tables<double, int64_t>(1, 1, RopeSeries{10000.0, 1}, 1.0);
  RopeFrequencies given{};
  for (int i = 0; i < 5; ++i) given.values[i] = 1.0 / (1 + i * i);
  tables<float, int64_t>(3, 5, given, 1.25), tables<double, double>(7, 5, given, 1.25);
  vast_rope();
  return done();
}

}  // namespace emulation::rope
