// Vocab-parallel cross entropy and embedding.

#include "harness.h"

#include "kernels/vocab_cross_entropy.cuh"
#include "kernels/vocab_embedding.cuh"

using namespace emulation;
using namespace tp_ext;

namespace emulation::vocabulary {

struct InRange {
  void operator()(bool ok) const {
    if (!ok) wrong("an index out of range");
  }
};

constexpr int64_t kIgnored = -100;

// Rows of `width` columns, `stride` apart, the first vocab_local of them in the vocabulary
struct Logits {
  int64_t rows, width, vocab_local, stride, shift;
};

inline int ahead = 0;  // launches of the kernels that load the next row

template <typename T>
void cross_entropy(const Logits& l, int64_t grad_stride, int64_t grad_shift, int blocks) {
  using A = acc_t<T>;
  const int64_t rows = l.rows, start = 7, vocab = start + l.vocab_local + 5, n = l.vocab_local;
  // Ends with the last row: after the end of a row comes the next row, or nothing
  const auto x = values<T>(rows ? (rows - 1) * l.stride + l.width : 0, l.shift, 1, -8, 8);
  Tensor<int64_t> target(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t choices[] = {start, start + n - 1, start - 1, start + n, kIgnored, start + n / 2};
    target[r] = choices[r % 6];
  }
  const auto name = std::string("cross entropy ") + type_name<T>() + " " + std::to_string(rows) +
                    " x " + std::to_string(l.width) + ", " + std::to_string(n) + " local, stride " +
                    std::to_string(l.stride) + " shift " + std::to_string(l.shift) + " gradient " +
                    std::to_string(grad_stride) + " + " + std::to_string(grad_shift);
  const CeOptions<A> options{A(0.1), A(1e-3), A(vocab)};
  const auto grad = values<A>(rows, 0, 5);

  static int turn = 0;  // by the rule, and choices of the table
  const LaunchChoice choices[] = {{}, {0, 32, 3}, {0, 128, 1}, {0, 64, 2}, {0, 32, 1, 0, 1}};
  const LaunchChoice& tuned = choices[turn++ % 5];
  const CeBlock block = ce_block<T>(n, tuned), of_width = ce_block<T>(l.width, tuned);
  const auto [stats, loss, lse] = run_in_every_order(name + " forward", [&] {
    Tensor<A> stats(rows * 4), loss(rows), lse(rows * 2);
    auto* kernel = ce_stats_kernel<T, InRange>;
    if constexpr (sizeof(T) <= 4) {
      if (ce_ahead<T>(n, {x.data()}, {l.stride}, tuned))
        kernel = ce_stats_ahead_kernel<T, InRange>, ++ahead;
    }
    launch(std::min(ce_blocks(rows, block), blocks), dim3(block.threads, block.rows), [&] {
      kernel(x, l.stride, rows, n, target, start, vocab, kIgnored, stats, InRange(), -1);
    });
    launch(std::min(grid_for(rows), blocks), kThreads,
           [&] { ce_loss_kernel<A>(stats, 1, rows, target, kIgnored, options, loss, lse); });
    return results(stats, loss, lse);
  });
  std::vector<CeStats<double>> want;
  for (int64_t r = 0; r < rows; ++r) {
    CeStats<double> row = no_columns<double>();
    const auto at = [&](int64_t j) { return as_double(x[r * l.stride + j]); };
    for (int64_t j = 0; j < n; ++j) row.max = std::max(row.max, at(j)), row.sum += at(j);
    for (int64_t j = 0; j < n; ++j) row.sum_exp += std::exp(at(j) - row.max);
    const int64_t hit = target[r] - start;
    row.target = hit >= 0 && hit < n ? at(hit) : 0;
    want.push_back(row);
  }
  const auto column = [](const CeStats<double>& s, int64_t i) {
    return i == 0 ? s.max : i == 1 ? s.sum_exp : i == 2 ? s.target : s.sum;
  };
  const double eps = kEps<A>;
  expect_near<A>(
      "stats", stats, [&](int64_t i) { return column(want[i / 4], i % 4); },
      [&](int64_t i) {
        const double e = want[i / 4].sum_exp;
        return i % 4 == 1   ? eps * (20 + std::sqrt(n)) * e
               : i % 4 == 3 ? eps * 8 * (20 + std::sqrt(n)) * (1 + std::sqrt(n))
                            : 0;
      });
  for (int64_t r = 0; r < rows; ++r) {  // by the formula, to the bit
    const CeStats<A> s{stats[4 * r], stats[4 * r + 1], stats[4 * r + 2], stats[4 * r + 3]};
    CeStats<A> merged = no_columns<A>();
    merge(merged, s);
    if (loss[r] != (target[r] == kIgnored ? A(0) : ce_loss(merged, options))) wrong("the loss");
    if (lse[2 * r] != s.max || lse[2 * r + 1] != log_of(merged.sum_exp)) wrong("lse");
  }

  const auto formula = [&](int64_t r, int64_t j) {
    if (target[r] == kIgnored || j >= n) return from_acc<T>(A(0));
    const CeRowGrad<A> row(grad[r], lse.data() + 2 * r, options);
    const A logit = to_acc(x[r * l.stride + j]);
    return from_acc<T>(j == target[r] - start ? row.at_target(logit) : row(logit));
  };
  const auto backward = [&](const T* from, T* to, int64_t stride) {
    auto* kernel = ce_bwd_kernel<T>;
    if constexpr (sizeof(T) <= 4) {
      if (ce_ahead<T>(l.width, {from, to}, {l.stride, stride}, tuned))
        kernel = ce_bwd_ahead_kernel<T>, ++ahead;
    }
    launch(std::min(ce_blocks(rows, of_width), blocks), dim3(of_width.threads, of_width.rows), [&] {
      kernel(grad, from, l.stride, to, stride, rows, l.width, n, target, lse, start, kIgnored,
             options);
    });
  };
  if (rows == 0 || l.width == 0) return;
  const auto check = [&](const Tensor<T>& dx, int64_t stride, const T* between) {
    Tensor<T> all(dx.size());
    for (int64_t i = 0; i < dx.size(); ++i) {
      if (i % stride < l.width)
        all[i] = formula(i / stride, i % stride);
      else if (between)
        all[i] = between[i];
    }
    expect_equal("dx", dx, all);
  };
  const auto [dx] = run_in_every_order(name + " backward", [&] {
    Tensor<T> dx((rows - 1) * grad_stride + l.width, grad_shift);
    backward(x, dx, grad_stride);
    return results(dx);
  });
  check(dx, grad_stride, nullptr);
  const auto [over] = run_in_every_order(name + " backward in place", [&] {
    Tensor<T> copy = x.copy();
    backward(copy, copy, l.stride);
    return results(copy);
  });
  check(over, l.stride, x);
}

template <typename T>
void cross_entropies() {
  constexpr int64_t N = kVec<T>;
  for (const int64_t n : {int64_t{1}, N - 1, 5 * N, 33 * N + 1})
    cross_entropy<T>({3, n, n, n, 0}, n, 0, 2);
  for (const int64_t shift : {int64_t{0}, int64_t{1}, N - 1}) {
    cross_entropy<T>({7, 70 * N + 3, 70 * N + 1, 70 * N + 4, shift}, 70 * N + 3, shift, 3);
    cross_entropy<T>({2, 9 * N, 9 * N, 9 * N, shift}, 9 * N, shift + 1, 2);
  }
  cross_entropy<T>({1, 2, 2, 2, N - 1}, 2, N - 1, 1);  // ends before the first boundary
  ahead = 0;  // whole vectors: the next row is loaded; by the rule and by choices
  for (const int64_t n : {128 * N, 33 * N, N})
    for (int i = 0; i < 5; ++i) cross_entropy<T>({19, n, n, n + i * N, N}, n + N, 2 * N, 2);
  cross_entropy<T>({11, 40 * N, 33 * N, 40 * N, 0}, 40 * N, 0, 1);  // columns of no vocabulary
  if (sizeof(T) <= 4 && ahead == 0) wrong("no row was loaded ahead");
}

struct Noted {
  bool* all;
  void operator()(bool ok) const { *all = *all && ok; }
};

// Results of three ranks that exchange their rows, each with its width and vocabulary in an extra
// row
void shards_of_a_vocabulary(const std::vector<CeShard>& shards, int64_t last_target,
                            bool expect_agree, bool expect_in_range) {
  using T = float;
  const int64_t ranks = 3, rows = 5;
  Tensor<int64_t> target(rows);
  for (int64_t r = 0; r < rows; ++r)
    target[r] = r == rows - 1 ? last_target : r == 1 ? kIgnored : r;
  const CeOptions<T> options{0, 0, T(shards[0].vocab_size)};
  bool agree = true, in_range = true;
  const auto [stats, loss, lse] = run_in_every_order("shards of a vocabulary", [&] {
    Tensor<T> stats(ranks * (rows + 1) * 4), loss(rows), lse(rows * 2);
    for (int64_t rank = 0, start = 0; rank < ranks; start += shards[rank++].width) {
      const int64_t n = shards[rank].width;
      const auto x = values<T>(rows * n, 0, 3 + rank, -2, 2);
      const CeBlock block = ce_block<T>(n);
      launch(2, dim3(block.threads, block.rows), [&] {
        ce_stats_kernel<T>(x, n, rows, n, target, start, shards[rank].vocab_size, kIgnored,
                           stats + rank * (rows + 1) * 4, InRange(), n);
      });
    }
    launch(1, kThreads, [&] {
      ce_check_kernel<T>(stats, ranks, rows, target, shards[0].vocab_size, kIgnored, Noted{&agree},
                         Noted{&in_range});
    });
    launch(1, kThreads,
           [&] { ce_loss_kernel<T>(stats, ranks, rows, target, kIgnored, options, loss, lse, 1); });
    return results(stats, loss, lse);
  });
  if (agree != expect_agree) wrong("whether the shards agree");
  if (in_range != expect_in_range) wrong("whether the targets are in the vocabulary");
  for (int64_t r = 0; r < rows; ++r) {
    CeStats<T> merged = no_columns<T>();
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto at = [&](int64_t i) { return stats[4 * (rank * (rows + 1) + r) + i]; };
      merge(merged, CeStats<T>{at(0), at(1), at(2), at(3)});
    }
    if (loss[r] != (target[r] == kIgnored ? T(0) : ce_loss(merged, options))) wrong("the loss");
  }
}

void shards() {
  shards_of_a_vocabulary({{4, 10}, {3, 10}, {3, 10}}, 9, true, true);
  shards_of_a_vocabulary({{4, 10}, {3, 10}, {3, 10}}, 10, true, false);
  shards_of_a_vocabulary({{4, 10}, {4, 10}, {4, 10}}, 9, true, true);
  shards_of_a_vocabulary({{4, 12}, {3, 9}, {3, 9}}, 9, false, true);
  shards_of_a_vocabulary({{3, 10}, {3, 10}, {3, 10}}, 9, false, true);
  shards_of_a_vocabulary({{4, 10}, {4, 10}, {3, 10}}, 9, false, true);
}

// The last row of logits of more than 2^31 elements
void vast_cross_entropy() {
  using T = BFloat16;
  const int64_t n = 33333, rows = (int64_t{1} << 31) / n + 9, size = rows * n;
  current_case = "cross entropy over more than 2^31 elements";
  ++cases;
  T* const x = vast<T>(size);
  float *const stats = vast<float>(rows * 4), *const lse = vast<float>(rows * 2);
  float* const grad = vast<float>(rows);
  auto* const target = vast<int64_t>(rows);
  const int64_t r = rows - 1;
  target[r] = n - 1, grad[r] = 1;
  const CeBlock block = ce_block<T>(n);
  const unsigned blocks = ce_blocks(rows, block);
  launch(blocks, dim3(block.threads, block.rows),
         [&] { ce_stats_kernel<T>(x, n, rows, n, target, 0, n, kIgnored, stats, InRange()); }, 0,
         {dim3(blocks - 1, 0)});
  if (stats[4 * r] != 0 || stats[4 * r + 1] != n) wrong("the last row's sum of 1");
  lse[2 * r + 1] = std::log(static_cast<float>(n));
  launch(
      blocks, dim3(block.threads, block.rows),
      [&] {
        ce_bwd_kernel<T>(grad, x, n, x, n, rows, n, n, target, lse, 0, kIgnored, {0, 0, float(n)});
      },
      0, {dim3(blocks - 1, 0)});
  const CeRowGrad<float> row(1, lse + 2 * r, {0, 0, float(n)});
  if (x[size - 1].bits != T(row.at_target(0)).bits || x[size - n].bits != T(row(0)).bits ||
      as_double(x[size - n - 1]) != 0)
    wrong("the last row's gradient");
  unmap(x, size), unmap(stats, rows * 4), unmap(lse, rows * 2), unmap(grad, rows),
      unmap(target, rows);
}

template <typename T, typename Id, int N>
void embedding(int64_t tokens, int64_t hidden, int blocks) {
  using A = acc_t<T>;
  const int64_t start = 10, local = 6, rows = 8, vocab = 30;  // rows: 2 of them padding
  const auto weight = values<T>(rows * hidden, 0, 1), grad = values<T>(tokens * hidden, 0, 2);
  Tensor<Id> ids(tokens);
  Random random{3};
  for (int64_t t = 0; t < tokens; ++t)
    ids[t] = random() % 3 ? start + random() % local : random() % vocab;
  const auto name = std::string("embedding ") + type_name<T>() + " " + std::to_string(tokens) +
                    " x " + std::to_string(hidden) + " N " + std::to_string(N);
  const auto grid = [&](int parts) {
    return std::min(grid_for(warp_row_threads<N>(tokens, hidden, parts)), blocks);
  };
  Tensor<int16_t> sorted(tokens);
  Tensor<int64_t> order(tokens);
  Tensor<T> want(tokens * hidden), want_dw(rows * hidden);
  std::fill_n(want_dw.data(), rows * hidden, from_acc<T>(A(0)));
  const auto [y, unsorted] = run_in_every_order(name, [&] {
    Tensor<T> y(tokens * hidden);
    Tensor<int64_t> found(tokens);
    launch(grid(kParts), kThreads, [&] {
      embedding_fwd_kernel<N, T, Id>(weight, ids, tokens, hidden, start, local, vocab, y,
                                     InRange());
    });
    launch(std::min(grid_for(tokens), blocks), kThreads,
           [&] { embedding_rows_kernel<Id, int64_t>(ids, tokens, start, local, rows, found); });
    return results(y, found);
  });
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t row = ids[t] - start;
    const bool here = row >= 0 && row < local;
    if (unsorted[t] != (here ? row : rows)) wrong("the row of an id");
    for (int64_t j = 0; j < hidden; ++j)
      want[t * hidden + j] = here ? weight[row * hidden + j] : from_acc<T>(A(0));
    order[t] = t;
  }
  expect_equal("y", y, want);
  std::stable_sort(order.data(), order.data() + tokens,
                   [&](int64_t a, int64_t b) { return unsorted[a] < unsorted[b]; });
  for (int64_t i = 0; i < tokens; ++i) sorted[i] = static_cast<int16_t>(unsorted[order[i]]);
  for (int64_t row = 0; row < local; ++row)
    for (int64_t j = 0; j < hidden; ++j) {  // in token order: to the bit
      A sum = 0;
      for (int64_t t = 0; t < tokens; ++t)
        if (unsorted[t] == row) sum += to_acc(grad[t * hidden + j]);
      want_dw[row * hidden + j] = from_acc<T>(sum);
    }
  const auto backward = [&](auto at_once) {
    const auto [dw] = run_in_every_order(name + " backward", [&] {
      Tensor<T> dw(rows * hidden);
      Tensor<Segment> segments(rows);
      std::fill_n(segments.data(), rows, Segment{0, 0});
      launch(std::min(grid_for(tokens), blocks), kThreads,
             [&] { embedding_segments_kernel<int16_t>(sorted, tokens, rows, segments); });
      launch(std::min(grid_for(warp_row_threads<N>(rows, hidden)), blocks), kThreads, [&] {
        embedding_bwd_kernel<N, decltype(at_once)::value, T>(grad, segments, order, hidden, rows,
                                                             dw);
      });
      return results(dw);
    });
    expect_equal("dw", dw, want_dw);
  };
  backward(std::integral_constant<int, 4>{}), backward(std::integral_constant<int, 8>{});
}

// The last token's last columns in an output of more than 2^31 elements
void vast_embedding() {
  using T = BFloat16;
  constexpr int N = kVec<T>;
  const int64_t hidden = 8192, tokens = (int64_t{1} << 31) / hidden + 5, size = tokens * hidden;
  current_case = "embedding over more than 2^31 elements";
  ++cases;
  T* const y = vast<T>(size);
  auto* const ids = vast<int64_t>(tokens);
  const auto weight = values<T>(2 * hidden, 0, 1);
  ids[tokens - 1] = 1;
  const int64_t threads = warp_row_threads<N>(tokens, hidden, kParts), last = threads / kWarp - 1;
  const int grid = grid_for(threads), warps = grid * (kThreads / kWarp);
  launch(grid, kThreads,
         [&] {
           embedding_fwd_kernel<N, T>(weight.data(), ids, tokens, hidden, 0, 2, 2, y, InRange());
         },
         0, {dim3(static_cast<unsigned>(last % warps / (kThreads / kWarp)), 0)});
  if (y[size - 1].bits != weight[2 * hidden - 1].bits) wrong("the last element");
  unmap(y, size), unmap(ids, tokens);
}

template <typename T>
void embeddings() {
  constexpr int N = kVec<T>;
  for (const int64_t tokens : {1, 37}) {
    embedding<T, int64_t, 1>(tokens, 35, 3);
    embedding<T, int32_t, N>(tokens, N, 1);
    embedding<T, int32_t, N>(tokens, 33 * N, 4);
    embedding<T, int64_t, N>(tokens, 163 * N, 2);  // a part of a warp's second share of a row
  }
}

int program(int, char**) {
  cross_entropies<float>(), cross_entropies<BFloat16>();
#ifdef EVERY_TYPE
  cross_entropies<double>();
  cross_entropy<Half>({2, 41, 41, 41, 1}, 41, 1, 2);
#endif
  // 512 threads: four vectors at once and one more; four at once for some, one by one for others
  cross_entropy<float>({1, 9001, 9001, 9001, 1}, 9001, 1, 1);
  cross_entropy<float>({1, 7001, 7001, 7001, 1}, 7001, 1, 1);
  embeddings<float>(), embeddings<BFloat16>();
  shards();
  vast_cross_entropy();
  vast_embedding();
  return done();
}

}  // namespace emulation::vocabulary
