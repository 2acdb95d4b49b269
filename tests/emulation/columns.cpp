// bias_act, gated_act and their column sums.

#include "harness.h"

#include "kernels/bias_act.cuh"
#include "kernels/gated_act.cuh"

using namespace emulation;
using namespace tp_ext;

namespace emulation::columns {

std::string label(const char* what, const char* type, int64_t rows, int64_t n, int64_t shift,
                  bool bias) {
  return std::string(what) + " " + type + " [" + std::to_string(rows) + ", " + std::to_string(n) +
         "] shift " + std::to_string(shift) + (bias ? " bias" : "");
}

// The sums of the columns of a [rows, n] tensor whose elements went through acc_t<T> unrounded
template <typename T>
void expect_column_sums(const Tensor<T>& got, int64_t rows, int64_t n,
                        const std::vector<acc_t<T>>& of) {
  std::vector<double> sum(n, 0), size(n, 0);
  for (int64_t i = 0; i < rows * n; ++i) sum[i % n] += of[i], size[i % n] += std::fabs(of[i]);
  expect_near<T>(
      "column sums", got, [&](int64_t j) { return sum[j]; },
      [&](int64_t j) { return rows * kEps<acc_t<T>> * size[j]; });
}

template <typename T>
Tensor<T> sum_of_partials(const Tensor<acc_t<T>>& partial, int64_t rows, int64_t n) {
  Tensor<T> sum(n);
  if (n == 0) return sum;
  launch(sum_partials_grid(n), sum_partials_block(),
         [&] { sum_partials_kernel<T>(partial, sum, rows, n); });
  return sum;
}

// A launch of N elements per thread, by the launchers' choice or narrowed to few rows of blocks, so
// that threads go round their loops
ColumnGrid grid_for_columns(int64_t rows, int64_t n, int vec, bool narrow) {
  ColumnGrid grid = column_grid(rows, n, vec);
  if (narrow && grid.row_blocks > 2) grid.row_blocks = 2;
  return grid;
}

template <typename Act, bool kBias, int N, typename T>
void bias_act_shape(int64_t rows, int64_t n, int64_t shift, const Tensor<T>& x,
                    const Tensor<T>& bias, const Tensor<T>& grad, bool narrow) {
  using A = acc_t<T>;
  const T* const b = kBias ? bias.data() : nullptr;
  const ColumnGrid grid = grid_for_columns(rows, n, N, narrow);
  Tensor<T> want_y(rows * n), want_dx(rows * n);
  std::vector<A> dx(rows * n);
  for (int64_t i = 0; i < rows * n; ++i) {
    const A in = kBias ? to_acc(x[i]) + to_acc(bias[i % n]) : to_acc(x[i]);
    want_y[i] = from_acc<T>(DeviceForm<Act, T>::value(in));
    dx[i] = DeviceForm<Act, T>::backward(to_acc(grad[i]), in);
    want_dx[i] = from_acc<T>(dx[i]);
  }
  const bool whole = n % N == 0;
  if (whole || rows == 1) {
    const auto [y] =
        run_in_every_order(label("bias_act", type_name<T>(), rows, n, shift, kBias), [&] {
          Tensor<T> y(rows * n, shift);
          launch(grid_of(grid), block_of(grid),
                 [&] { bias_act_forward_kernel<Act, kBias, N>(x.data(), b, y.data(), rows, n); });
          return results(y);
        });
    expect_equal("y", y, want_y);
  }
  if (!whole && kBias) return;
  const auto [d, sums] =
      run_in_every_order(label("bias_act backward", type_name<T>(), rows, n, shift, kBias), [&] {
        Tensor<T> d(rows * n, shift);
        Tensor<A> partial(kBias ? grid.row_blocks * n : 0);
        launch(grid_of(grid), block_of(grid), [&] {
          bias_act_backward_kernel<Act, kBias, N>(grad.data(), x.data(), b, d.data(),
                                                  partial.data(), rows, n);
        });
        auto sum = sum_of_partials<T>(partial, grid.row_blocks, kBias ? n : 0);
        return results(d, sum);
      });
  expect_equal("dx", d, want_dx);
  if (kBias) expect_column_sums<T>(sums, rows, n, dx);
}

template <typename Act, typename T>
void bias_act(int64_t rows, int64_t n, int64_t shift, bool narrow = false) {
  const auto x = values<T>(rows * n, shift, 1), grad = values<T>(rows * n, shift, 2),
             bias = values<T>(n, shift, 3);
  const bool forward = bias_act_forward_vectors<T>(rows, n, x, bias, x);
  const bool backward = bias_act_backward_vectors<T>(n, grad, x, bias, x);
  const bool aligned = shift * sizeof(T) % kVecBytes == 0;
  if (forward != (aligned && (rows == 1 || n % kVec<T> == 0)) ||
      backward != (aligned && n % kVec<T> == 0))
    wrong("vectors are chosen where they should not be, or the other way round");
  bias_act_shape<Act, true, 1>(rows, n, shift, x, bias, grad, narrow);
  if (forward) bias_act_shape<Act, true, kVec<T>>(rows, n, shift, x, bias, grad, narrow);
  const int64_t flat = flat_columns(rows * n, kVec<T>);
  if (aligned)
    bias_act_shape<Act, false, kVec<T>>(rows * n / flat, flat, shift, x, bias, grad, narrow);
  if (!narrow) bias_act_shape<Act, false, 1>(rows * n / flat, flat, shift, x, bias, grad, narrow);
}

template <typename Act, bool kBias, int N, typename T>
void gated_act_shape(int64_t rows, int64_t f, int64_t shift, bool narrow) {
  using A = acc_t<T>;
  const auto x = values<T>(rows * 2 * f, shift, 1), grad = values<T>(rows * f, shift, 2),
             bias = values<T>(2 * f, shift, 3);
  const T* const b = kBias ? bias.data() : nullptr;
  const ColumnGrid grid = grid_for_columns(rows, f, N, narrow);
  Tensor<T> want_y(rows * f), want_dx(rows * 2 * f);
  std::vector<A> dx(rows * 2 * f);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t j = 0; j < f; ++j) {
      const int64_t g = row * 2 * f + j, u = g + f;
      const A gate = kBias ? to_acc(x[g]) + to_acc(bias[j]) : to_acc(x[g]);
      const A up = kBias ? to_acc(x[u]) + to_acc(bias[f + j]) : to_acc(x[u]);
      want_y[row * f + j] = from_acc<T>(DeviceForm<Act, T>::value(gate) * up);
      const auto act = DeviceForm<Act, T>::value_slope(gate);
      const A dy = to_acc(grad[row * f + j]);
      dx[g] = dy * up * act.slope, dx[u] = dy * act.value;
      want_dx[g] = from_acc<T>(dx[g]), want_dx[u] = from_acc<T>(dx[u]);
    }
  const auto name = label("gated_act", type_name<T>(), rows, f, shift, kBias);
  const auto [y, d, sums] = run_in_every_order(name, [&] {
    Tensor<T> y(rows * f, shift), d(rows * 2 * f, shift);
    Tensor<A> partial(kBias ? grid.row_blocks * 2 * f : 0);
    launch(grid_of(grid), block_of(grid),
           [&] { gated_act_forward_kernel<Act, kBias, N>(x.data(), b, y.data(), rows, f); });
    launch(grid_of(grid), block_of(grid), [&] {
      gated_act_backward_kernel<Act, kBias, N>(grad.data(), x.data(), b, d.data(), partial.data(),
                                               rows, f);
    });
    auto sum = sum_of_partials<T>(partial, grid.row_blocks, kBias ? 2 * f : 0);
    return results(y, d, sum);
  });
  expect_equal("y", y, want_y);
  expect_equal("dx", d, want_dx);
  if (kBias) expect_column_sums<T>(sums, rows, 2 * f, dx);
}

template <typename Act, typename T>
void gated_act(int64_t rows, int64_t f, int64_t shift, bool narrow = false) {
  gated_act_shape<Act, true, 1, T>(rows, f, shift, narrow);
  if (f % kVec<T> != 0 || shift * sizeof(T) % kVecBytes != 0) return;
  gated_act_shape<Act, true, kVec<T>, T>(rows, f, shift, narrow);
  gated_act_shape<Act, false, kVec<T>, T>(rows, f, shift, narrow);
}

// The last and the first block over a tensor of more than 2^31 elements
template <bool kRows>
void vast_bias_act() {
  using T = BFloat16;
  constexpr int N = kVec<T>;
  const int64_t n = kRows ? 4096 : (int64_t{1} << 31) + 4096 + 5, rows = kRows ? 600001 : 1;
  current_case = "bias_act over more than 2^31 elements";
  ++cases;
  T *const x = vast<T>(rows * n), *const y = vast<T>(rows * n);
  const auto bias = values<T>(n < 5000 ? n : 1);
  const int64_t last = rows * n - 1;
  for (const int64_t i : {int64_t{0}, int64_t{1} << 31, last}) x[i] = T(1.5f);
  const ColumnGrid grid = column_grid(rows, n, N);
  const dim3 corner(static_cast<unsigned>(grid.tiles - 1),
                    static_cast<unsigned>(grid.row_blocks - 1));
  if (kRows) {
    // The block that meets the last row, and the rest of its thousand rows only through the loop
    const int64_t stride = grid.row_blocks * grid.ty, block_row = (rows - 1) % stride / grid.ty;
    launch(grid_of(grid), block_of(grid),
           [&] { bias_act_forward_kernel<Silu, true, N>(x, bias.data(), y, rows, n); }, 0,
           {dim3(corner.x, static_cast<unsigned>(block_row))});
    if (as_double(y[last]) !=
        as_double(T(DeviceForm<Silu, T>::value(1.5f + as_double(bias[n - 1])))))
      wrong("the last element");
    T* const dx = vast<T>(rows * n);
    float* const partial = vast<float>(grid.row_blocks * n);
    launch(
        grid_of(grid), block_of(grid),
        [&] { bias_act_backward_kernel<Silu, true, N>(x, x, bias.data(), dx, partial, rows, n); },
        0, {dim3(corner.x, static_cast<unsigned>(block_row))});
    const float d = DeviceForm<Silu, T>::backward(1.5f, 1.5f + to_acc(bias[n - 1]));
    if (dx[last].bits != T(d).bits || partial[(block_row + 1) * n - 1] != d)
      wrong("the last element of the gradient");
    unmap(dx, rows * n), unmap(partial, grid.row_blocks * n);
  } else {
    launch(grid_of(grid), block_of(grid),
           [&] { bias_act_forward_kernel<Silu, false, N, T>(x, nullptr, y, rows, n); }, 0,
           {dim3(0, 0), corner});
    const T want(DeviceForm<Silu, T>::value(1.5f));
    if (y[0].bits != want.bits || y[last].bits != want.bits) wrong("the first or last element");
  }
  unmap(x, rows * n);
  unmap(y, rows * n);
}

// The bounds of half_math.h, for every number of a half type, and NaN where the formula has it
template <typename Act, typename T>
void accuracy(const Call<double(double)>& factor, const Call<double(double)>& factor_slope) {
  using Form = DeviceForm<Act, T>;
  current_case = std::string("accuracy of an activation in ") + type_name<T>();
  ++cases;
  for (int bits = 0; bits < 1 << 16; ++bits) {
    T number;
    number.bits = static_cast<uint16_t>(bits);
    const float x = to_acc(number);
    const double want = x * factor(x), slope = factor(x) + x * factor_slope(x);
    const ValueSlope<float> got = Form::value_slope(x);
    if (std::isnan(Form::value(x)) != std::isnan(want) ||
        std::isnan(got.slope) != std::isnan(slope))
      wrong("NaN at " + std::to_string(x));
    if (!std::isfinite(x)) continue;
    const double granted = x < -1 && std::is_same_v<Act, Gelu> ? 1e-4 : 1e-5;
    for (const double value : {Form::value(x), got.value})
      if (!(std::fabs(value - want) <= granted * std::fabs(want) + 1e-35))
        wrong("the value at " + std::to_string(x) + " is " + std::to_string(value));
    if (!(std::fabs(got.slope - slope) <= 1e-6)) wrong("the slope at " + std::to_string(x));
  }
}

template <typename T>
void accuracies() {
  const double a = std::sqrt(8 / M_PI);
  accuracy<Gelu, T>([](double x) { return 0.5 * std::erfc(-x * M_SQRT1_2); },
                    [](double x) { return std::exp(-x * x / 2) / std::sqrt(2 * M_PI); });
  const auto logistic = [](double z) { return 1 / (1 + std::exp(-z)); };
  const auto z = [&](double x) { return a * (x + 0.044715 * x * x * x); };
  accuracy<GeluTanh, T>(
      [&](double x) { return logistic(z(x)); },
      [&](double x) { return logistic(z(x)) * logistic(-z(x)) * a * (1 + 0.134145 * x * x); });
  accuracy<Silu, T>(logistic, [&](double x) { return logistic(x) * logistic(-x); });
}

int program(int, char**) {
  accuracies<BFloat16>(), accuracies<Half>();
  for_all_types([](auto type) {
    using T = decltype(type);
    constexpr int64_t N = kVec<T>;
    for (const int64_t shift : {int64_t{0}, N, int64_t{1}}) {
      bias_act<Gelu, T>(3, 5 * N, shift);
      bias_act<Gelu, T>(1, 5 * N + 3, shift);
      bias_act<Gelu, T>(300, 2 * N, shift, true);
      gated_act<Silu, T>(3, 5 * N, shift);
    }
    bias_act<Gelu, T>(4, 16 * N, 0);  // without a bias two rows of 32 vectors
    bias_act<GeluTanh, T>(3, 5 * N, 0);
    bias_act<Silu, T>(300, 32 * N, 0, true);
    bias_act<Gelu, T>(2, 1, 0);
    bias_act<Gelu, T>(1, 300 * N + 1, 0);
    gated_act<Silu, T>(2, 1, 0);
    gated_act<Silu, T>(70, 33 * N, 0, true);
    bias_act_shape<Gelu, true, 1, T>(0, 5, 0, values<T>(0), values<T>(5), values<T>(0), false);
  });
  vast_bias_act<true>();
  vast_bias_act<false>();
  return done();
}

}  // namespace emulation::columns
