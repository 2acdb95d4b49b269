// Kernels that draw by global index: dropout with bias and residual, and the fills.

#include <array>

#include "harness.h"

#include "kernels/bias_dropout_residual.cuh"
#include "kernels/random_fill.cuh"

using namespace emulation;
using namespace tp_ext;

namespace emulation::random_words {

std::string label(const char* what, const char* type, int64_t n, const GlobalIndex& index) {
  return std::string(what) + " " + type + " " + std::to_string(n) + " in rows of " +
         std::to_string(index.local_inner) + " of " + std::to_string(index.full_inner) + " from " +
         std::to_string(index.offset);
}

// The 32 bits that decide on an element
uint32_t number_of(uint64_t seed, uint64_t index) {
  const int place = index % kCounterHalves;
  return half_word(philox4x32(seed, index / kCounterHalves), place) << 16 |
         half_word(philox4x32(seed, index / kCounterHalves, 1), place);
}

template <typename A>
bool kept(const Dropout<A>& dropout, uint64_t seed, uint64_t index) {
  return number_of(seed, index) >= (dropout.upper << 16 | dropout.lower);
}

constexpr uint64_t kSeed = 0x123456789abcdef;

template <typename T>
void dropout(int64_t rows, const GlobalIndex& index, int64_t bias_size, bool residual,
             int64_t shift, double p, bool vectors, const std::vector<int64_t>& given = {}) {
  using A = acc_t<T>;
  const int64_t n = rows * index.local_inner;
  const auto x = values<T>(n, shift, 1), bias = values<T>(bias_size, shift, 2),
             rest = values<T>(residual ? n : 0, shift, 3);
  const int64_t numbers = 1 + static_cast<int64_t>(given.size());  // rows come with the seed
  Tensor<int64_t> seed(numbers);
  seed[0] = kSeed;
  for (int64_t i = 1; i < numbers; ++i) seed[i] = given[i - 1];
  const auto arguments = [&](T* y) {
    return DropoutArgs<T>{x,
                          bias_size ? bias.data() : nullptr,
                          residual ? rest.data() : nullptr,
                          y,
                          n,
                          bias_size ? bias_size : 1,
                          {seed, numbers},
                          Dropout<A>(p),
                          index};
  };
  const auto name = label("dropout", type_name<T>(), n, index);
  const auto [y] = run_in_every_order(name, [&] {
    Tensor<T> y(n, shift);
    const DropoutArgs<T> a = arguments(y);
    if (dropout_vectorisable(a) != vectors) wrong("the choice of vectors");
    launch(std::min(grid_for(rows * quads_per_row(index)), 2), kThreads,
           [&] { dropout_general_kernel<T>(a); });
    return results(y);
  });
  Tensor<T> want(n);
  std::vector<A> unrounded(n);
  const Dropout<A> drop(p);
  for (int64_t i = 0; i < n; ++i) {
    A value = to_acc(x[i]);
    if (bias_size) value += to_acc(bias[i % bias_size]);
    const int64_t row = i / index.local_inner;
    const int64_t moved = given.empty() ? 0 : numbers == 2 ? given[0] : given[row] - row;
    const uint64_t place = index(i) + moved * index.full_inner;
    unrounded[i] = value *= drop.factor(drop.keeps_all() || kept(drop, seed[0], place));
    if (residual) value += to_acc(rest[i]);
    want[i] = from_acc<T>(value);
  }
  expect_equal("y", y, want);
  if (!vectors) return;
  const DropoutArgs<T> whole = arguments(nullptr);
  // The last dim as that of the bias, or as long as a row
  const DropoutRows by = dropout_rows(whole, bias_size ? bias_size : index.local_inner);
  const auto walk = [&](auto form, auto at_once, bool narrow) {
    constexpr DropoutForm kForm = decltype(form)::value;
    Tensor<T> y(n, shift);
    const DropoutArgs<T> a = arguments(y);
    ColumnGrid grid = column_grid(by.rows, by.columns, kDropoutVec<T>);
    if (narrow) grid.row_blocks = 1;
    Tensor<A> partial(kForm == DropoutForm::kSummed ? grid.row_blocks * by.columns : 0);
    launch(grid_of(grid), block_of(grid),
           [&] { dropout_vector_kernel<T, kForm, decltype(at_once)::value>(a, by, partial); });
    return results(y, partial);
  };
  const auto walks = [&](auto form) {
    constexpr DropoutForm kForm = decltype(form)::value;
    const auto once = std::integral_constant<int, 1>{};
    const auto twice = std::integral_constant<int, 2>{};
    const auto [y1, sums1] =
        run_in_every_order(name + " by rows", [&] { return walk(form, once, false); });
    const auto [y2, sums2] =
        run_in_every_order(name + " by two rows", [&] { return walk(form, twice, false); });
    expect_equal("y", y1, want), expect_equal("y", y2, want);
    if (!sums1.same_bits(sums2)) wrong("the sums depend on the rows at once");
    expect_equal("y", std::get<0>(walk(form, once, true)), want);
    expect_equal("y", std::get<0>(walk(form, twice, true)), want);
    if (kForm != DropoutForm::kSummed) return;
    std::vector<double> sum(by.columns, 0), size(by.columns, 0);
    for (int64_t i = 0; i < n; ++i)
      sum[i % by.columns] += unrounded[i], size[i % by.columns] += std::fabs(unrounded[i]);
    Tensor<A> total(by.columns);
    launch(sum_partials_grid(by.columns), sum_partials_block(),
           [&] { sum_partials_kernel<A>(sums1, total, sums1.size() / by.columns, by.columns); });
    expect_near<A>(
        "column sums", total, [&](int64_t j) { return sum[j]; },
        [&](int64_t j) { return by.rows * kEps<A> * size[j]; });
  };
  walks(std::integral_constant<DropoutForm, DropoutForm::kWhole>{});
  if (bias_size == 0 && !residual) {
    walks(std::integral_constant<DropoutForm, DropoutForm::kPlain>{});
    walks(std::integral_constant<DropoutForm, DropoutForm::kSummed>{});
  }
}

template <typename T>
void dropouts() {
  constexpr int64_t N = kDropoutVec<T>;
  dropout<T>(3, {10 * N, 20 * N, 10 * N}, 10 * N, true, 0, 0.3, true);
  dropout<T>(200, {4 * N, 4 * N, 0}, 2 * N, false, 0, 0.3, true);
  for (const int64_t rows : {1, 5, 300}) {  // dropout alone: with sums over the rows, too
    dropout<T>(rows, {40 * N, 40 * N, 0}, 0, false, 0, 0.3, true);
    dropout<T>(rows, {3 * N, 6 * N, 2 * N}, 0, false, 0, 0.3, true, {5});
  }
  dropout<T>(5, {3 * N, 6 * N, 2 * N}, 0, false, 0, 0.3, true, {7, 0, 4, 9, 1});
  for (const auto& given : {std::vector<int64_t>{}, {5}, {7, 0, 4}})  // rows of a last dim within
    dropout<T>(3, {10 * N, 10 * N, 0}, 2 * N, true, 0, 0.3, true, given);
  dropout<T>(2, {2 * N, 2 * N, 0}, 0, true, 0, 0, true);
  dropout<T>(2, {2 * N, 2 * N, 0}, 0, false, 0, 1, true);
  dropout<T>(3, {10 * N, 20 * N, 10 * N}, 10 * N, true, 1, 0.3, false);  // at an odd address
  dropout<T>(3, {10 * N, 20 * N + 1, N}, 0, true, 0, 0.3, false);        // counters cut in two
  dropout<T>(3, {10 * N, 20 * N, 3}, 5, true, 0, 0.3, false);
  dropout<T>(3, {10 * N, 20 * N, N / 2}, 0, true, 0, 0.3, false);
  dropout<T>(3, {10 * N, 20 * N + N / 2, 0}, 0, true, 0, 0.3, false);
  dropout<T>(3, {10 * N + N / 2, 20 * N, 0}, 0, true, 0, 0.3, false);
  dropout<T>(3, {11 * N, 21 * N, 9 * N}, 0, true, 0, 0.3, true);  // at odd vectors
  dropout<T>(3, {10 * N, 20 * N, 10 * N}, 10 * N, true, N, 0.3, true);
  dropout<T>(3, {10 * N, 20 * N, 10 * N}, 10 * N, true, N / 2, 0.3, false);
  dropout<T>(3, {10 * N, 20 * N, 10 * N}, 10 * N, true, 0, 0.3, true, {5});
  dropout<T>(3, {10 * N, 20 * N, 10 * N}, 10 * N, true, 0, 0.3, true, {7, 0, 4});
  dropout<T>(3, {7, 33, 6}, 7, true, 0, 0.3, false, {5});
  dropout<T>(3, {7, 33, 6}, 7, true, 0, 0.3, false, {7, 0, 4});
  const GlobalIndex whole{10 * N, 20 * N, 10 * N};
  for (const int64_t i : {0, 5, 17, 31, 36, 100})  // at the element's own number, and above it
    for (const int above : {0, 1}) {
      const double p = (number_of(kSeed, whole(i)) + above) / 4294967296.0;
      dropout<T>(3, whole, 0, true, 0, p, true);
      dropout<T>(3, whole, 0, false, 0, p, true);
    }
  dropout<T>(5, {7, 33, 6}, 7, true, 0, 0.3, false);
  dropout<T>(600, {1, 3, 2}, 1, false, 0, 0.3, false);
}

template <typename T, typename Draw>
void fill(const char* name, const Draw& draw, int64_t rows, const GlobalIndex& index) {
  const int64_t n = rows * index.local_inner;
  Tensor<int64_t> seed(1);
  seed[0] = -5;
  const auto [y] = run_in_every_order(label(name, type_name<T>(), n, index), [&] {
    Tensor<T> y(n);
    launch(fill_blocks(n, {0, 0, 0, 2}), kThreads,
           [&] { random_fill_kernel<T, Draw>(y, n, seed, draw, index); });
    return results(y);
  });
  Tensor<T> want(n);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t place = index(i);
    const PhiloxWords words = philox4x32(seed[0], place / 4);
    if constexpr (Draw::kPairs) {
      const int pair = place % 4 / 2 * 2;
      const ValuePair values = draw(words.w[pair], words.w[pair + 1]);
      want[i] = round_to<T>(place % 2 ? values.odd : values.even);
    } else {
      want[i] = round_to<T>(draw(words.w[place % 4]));
    }
  }
  expect_equal("self", y, want);
}

template <typename T>
void fills(int64_t rows, const GlobalIndex& index) {
  fill<T>("uniform", Uniform{0.5, 2}, rows, index);
  fill<T>("normal", Normal{0.5, 2}, rows, index);
  for (const double low : {-1.0, 4.0, 40.0, 50.0}) {
    const double high = low == 50 ? low + 1e-12 : low + 1;
    with_truncated_draw(truncated_normal(0, 1, low, high, low, high),
                        [&](auto draw) { fill<T>("truncated normal", draw, rows, index); });
  }
}

// An element of which the index in the full tensor, and the local one, are beyond 2^31
void vast_dropout() {
  using T = BFloat16;
  const int64_t rows = (int64_t{1} << 31) / 1024 + 3, n = rows * 1024;
  current_case = "dropout over more than 2^31 elements";
  ++cases;
  T *const x = vast<T>(n), *const y = vast<T>(n);
  const GlobalIndex index{1024, 4096, 2048};
  for (int64_t i = n - 1024; i < n; ++i) x[i] = T(1.f);
  int64_t seed = 3;
  const DropoutArgs<T> a{x, nullptr, nullptr, y, n, 1, {&seed, 1}, Dropout<float>(0.5), index};
  const DropoutRows by = dropout_rows(a, 1024);
  const ColumnGrid grid = column_grid(by.rows, by.columns, kDropoutVec<T>);
  const int64_t stride = grid.row_blocks * grid.ty, block_row = (by.rows - 1) % stride / grid.ty;
  launch(grid_of(grid), block_of(grid),
         [&] { dropout_vector_kernel<T, DropoutForm::kPlain, 2>(a, by, nullptr); }, 0,
         {dim3(static_cast<unsigned>(grid.tiles - 1), static_cast<unsigned>(block_row))});
  for (int64_t i = n - kDropoutVec<T>; i < n; ++i)
    if (as_double(y[i]) != a.dropout.factor(kept(a.dropout, seed, index(i))))
      wrong("the last elements");
  unmap(x, n), unmap(y, n);
}

// What a GPU computes otherwise than a CPU, to the same bits
void forms_of_the_gpu() {
  current_case = "forms of the GPU";
  ++cases;
  const double c[8][3] = {{1, 2, 3}, {4, 5, 6}, {7, 8, 9}, {1, -1, 2},
                          {3, 4, 5}, {6, 7, 8}, {9, 1, 2}, {3, 4, 5}};
  Random random{3};
  for (int i = 0; i < 100000; ++i) {
    const auto word =
        static_cast<uint32_t>(i < 4 ? std::array{0u, 1u, ~0u, 1u << 31}[i] : random());
    const auto rest = static_cast<int32_t>(word);
    if (unit_from_bits(word) != unit_uniform(word)) wrong("a uniform number");
    if (turn_from_bits(rest) != (rest + 0.5) * 9.31322574615478515625e-10) wrong("an angle");
    const bool first = i & 1, second = i & 2;
    const double x = unit_uniform(word);
    if (polynomial_by_branch(c, first, second, x) != polynomial(c, first, second, x))
      wrong("a polynomial");
  }
}

int program(int, char**) {
  forms_of_the_gpu();
  dropouts<float>(), dropouts<BFloat16>();
  for (const GlobalIndex& index :
       {GlobalIndex{12, 48, 24}, GlobalIndex{7, 33, 6}, GlobalIndex{1, 3, 2}})
    for (const int64_t rows : {0, 1, 350}) {
      fills<float>(rows, index), fills<BFloat16>(rows, index);
    }
#ifdef EVERY_TYPE
  dropouts<double>();
  dropout<Half>(3, {7, 33, 6}, 7, true, 0, 0.3, false);
  fills<double>(1, {1500, 1500, 0}), fills<Half>(1, {1501, 1501, 0});
#endif
  vast_dropout();
  return done();
}

}  // namespace emulation::random_words
