// RMSNorm and LayerNorm, with and without a residual, each gradient alone and all together, rows in
// registers, in shared memory and in neither.

#include "harness.h"

#include "kernels/norm_bwd.cuh"
#include "kernels/norm_fwd.cuh"

using namespace emulation;
using namespace tp_ext;

namespace emulation::norm {

struct Row {
  double mean, rstd;
};

template <typename T>
Row row_of(const Tensor<T>& x, int64_t row, int64_t n, bool centred, double eps) {
  double mean = 0, squares = 0;
  for (int64_t i = 0; i < n; ++i) mean += as_double(x[row * n + i]);
  mean = centred ? mean / n : 0;
  for (int64_t i = 0; i < n; ++i) {
    const double d = as_double(x[row * n + i]) - mean;
    squares += d * d;
  }
  return {mean, 1 / std::sqrt(squares / n + eps)};
}

template <typename T, typename W, bool kCentred>
struct Case {
  using A = acc_t<T>;
  int64_t rows, n, shift;
  unsigned blocks;
  bool aligned;
  bool fits = true;                              // false: as if a row did not fit the registers
  Tensor<T> input, residual, x, grad, grad_sum;  // x = input + residual
  Tensor<W> weight, bias;
  std::vector<Row> row;

  Case(int64_t rows, int64_t n, int64_t shift, unsigned blocks)
      : rows(rows),
        n(n),
        shift(shift),
        blocks(blocks),
        aligned(n % kVec<T> == 0 && shift * sizeof(T) % kVecBytes == 0),
        input(values<T>(rows * n, shift, 1, -1.5, 1.5)),
        residual(values<T>(rows * n, shift, 5, -1.5, 1.5)),
        x(rows * n, shift),
        grad(values<T>(rows * n, shift, 2)),
        grad_sum(values<T>(rows * n, shift, 6)),
        weight(values<W>(n, 0, 3)),
        bias(values<W>(n, 0, 4)) {
    for (int64_t i = 0; i < rows * n; ++i)
      x[i] = from_acc<T>(to_acc(input[i]) + to_acc(residual[i]));
    for (int64_t r = 0; r < rows; ++r) row.push_back(row_of(x, r, n, kCentred, 1e-5));
  }
  std::string name(const char* what) const {
    return std::string(kCentred ? "layer_norm " : "rms_norm ") + what + " " + type_name<T>() +
           " / " + type_name<W>() + " [" + std::to_string(rows) + ", " + std::to_string(n) +
           "] shift " + std::to_string(shift);
  }
  double hat(int64_t i) const { return (as_double(x[i]) - row[i / n].mean) * row[i / n].rstd; }
  double g(int64_t i) const { return as_double(grad[i]); }
  double w(int64_t i) const { return as_double(weight[i % n]); }
};

// Calls f(kept), the vectors that a thread keeps
template <typename T, typename F>
void with_kept(int kept, F f) {
  if constexpr (sizeof(T) == 2) {
    if (kept == 1) return f(std::integral_constant<int, 1>());
    if (kept == 2) return f(std::integral_constant<int, 2>());
  }
  f(std::integral_constant<int, kNormCached>());
}

// limit: bytes of shared memory that a block may have
template <typename T, typename W, bool kCentred>
void forward(const Case<T, W, kCentred>& c, bool adds, int64_t limit, int vectors) {
  using A = acc_t<T>;
  const int64_t rows = c.rows, n = c.n;
  NormLaunch shape = norm_fwd_launch<T>(n, c.aligned, {vectors});
  shape.cached &= c.fits;
  NormShared shared = {};
  if (!shape.cached) shared = norm_shared<T>(n, shape.groups, 1, 0, limit);
  auto* kernel = c.aligned ? norm_fwd_kernel<T, W, kCentred, kVec<T>, 0, true>
                           : norm_fwd_kernel<T, W, kCentred, 1, 0, true>;
  if (shape.cached) {
    with_kept<T>(shape.vectors, [&](auto kept) {
      constexpr int k = decltype(kept)::value;
      kernel = adds ? norm_fwd_kernel<T, W, kCentred, kVec<T>, k, true>
                    : norm_fwd_kernel<T, W, kCentred, kVec<T>, k, false>;
    });
  }
  const auto [y, sum, mean, rstd] = run_in_every_order(c.name("forward"), [&] {
    Tensor<T> y(rows * n, c.shift), sum(adds ? rows * n : 0, c.shift);
    Tensor<A> mean(kCentred ? rows : 0), rstd(rows);
    const unsigned grid = grid_for(rows, shape.groups);
    launch(
        grid < c.blocks ? grid : c.blocks, dim3(shape.width, shape.groups),
        [&] {
          kernel(adds ? c.input : c.x, adds ? c.residual.data() : nullptr, c.weight, c.bias,
                 adds ? sum.data() : nullptr, y, mean, rstd, rows, n, A(1e-5), shared.row);
        },
        shared.bytes);
    return results(y, sum, mean, rstd);
  });
  if (adds) expect_equal<T>("sum", sum, c.x);
  const double eps = kEps<A> * (16 + std::sqrt(n));
  expect_near<A>(
      "rstd", rstd, [&](int64_t r) { return c.row[r].rstd; },
      [&](int64_t r) { return eps * c.row[r].rstd; });
  expect_near<A>(
      "mean", mean, [&](int64_t r) { return c.row[r].mean; }, [&](int64_t) { return 3 * eps; });
  const auto b = [&](int64_t i) { return kCentred ? as_double(c.bias[i % n]) : 0; };
  expect_near<T>(
      "y", y, [&](int64_t i) { return c.hat(i) * c.w(i) + b(i); },
      [&](int64_t i) {
        const double size = 4 * c.row[i / n].rstd + std::fabs(c.hat(i));
        return eps * (size * std::fabs(c.w(i)) + std::fabs(b(i)));
      });
}

struct Wanted {
  bool dx, params, grad_sum;
};

template <typename T, typename W, bool kCentred>
void backward(const Case<T, W, kCentred>& c, Wanted wanted, int64_t limit, int vectors) {
  using A = acc_t<T>;
  const int64_t rows = c.rows, n = c.n;
  NormLaunch shape = norm_bwd_launch<T>(n, c.aligned, kCentred, {vectors}, wanted.grad_sum,
                                        c.fits ? 200 << 10 : 0);
  shape.cached &= c.fits;
  if (!shape.cached && shape.groups > 1) shape.width = 32, shape.groups = 1;
  const unsigned most = static_cast<unsigned>((rows + shape.groups - 1) / shape.groups);
  const unsigned blocks = most < c.blocks ? most : c.blocks;
  const int64_t sums = kCentred ? 2 : 1;
  NormShared shared = {};
  if (!shape.cached) shared = norm_shared<T>(n, shape.groups, 2, wanted.params ? sums : 0, limit);
  Tensor<A> mean(rows), rstd(rows);
  for (int64_t r = 0; r < rows; ++r) mean[r] = A(c.row[r].mean), rstd[r] = A(c.row[r].rstd);
  constexpr int N = kVec<T>;
  const auto run = [&](int stages) {
    Tensor<T> dx(wanted.dx ? rows * n : 0, c.shift);
    Tensor<W> dw(wanted.params ? n : 0), db(wanted.params && kCentred ? n : 0);
    Tensor<A> partial(wanted.params ? blocks * sums * n : 0);
    if (!shape.cached && !shared.sums) std::fill_n(partial.data(), partial.size(), A(0));
    const auto on_grid = [&](auto kernel, int64_t bytes, auto... more) {
      launch(
          blocks, dim3(shape.width, shape.groups),
          [&] {
            kernel(c.grad, c.x, wanted.grad_sum ? c.grad_sum.data() : nullptr, c.weight, mean, rstd,
                   wanted.dx ? dx.data() : nullptr, wanted.params ? partial.data() : nullptr, rows,
                   n, more...);
          },
          bytes);
    };
    if (stages == 2) {
      if constexpr (sizeof(T) == 2)
        with_kept<T>(shape.vectors, [&](auto kept) {
          constexpr int k = decltype(kept)::value;
          if constexpr (norm_staged_kept(k, kCentred))
            on_grid(wanted.params ? norm_bwd_staged_kernel<T, W, kCentred, N, k, true>
                                  : norm_bwd_staged_kernel<T, W, kCentred, N, k, false>,
                    norm_staged_bytes(shape, wanted.grad_sum));
        });
    } else if (shape.cached) {
      with_kept<T>(shape.vectors, [&](auto kept) {
        constexpr int k = decltype(kept)::value;
        on_grid(wanted.params ? norm_bwd_kernel<T, W, kCentred, N, k, true>
                              : norm_bwd_kernel<T, W, kCentred, N, k, false>,
                0, int64_t{0}, false);
      });
    } else {
      on_grid(c.aligned ? norm_bwd_kernel<T, W, kCentred, N, 0, true>
                        : norm_bwd_kernel<T, W, kCentred, 1, 0, true>,
              shared.bytes, shared.row, shared.sums);
    }
    const unsigned columns = grid_for(n, 32);
    if (wanted.params) {
      launch(dim3(columns < c.blocks ? columns : c.blocks, static_cast<unsigned>(sums)),
             dim3(32, kNormSumRows), [&] { norm_sum_kernel<A, W>(partial, dw, db, blocks, n); });
    }
    return results(dx, dw, db);
  };
  const auto [dx, dw, db] =
      run_in_every_order(c.name("backward"), [&] { return run(shape.stages); });
  if (shape.stages == 2) {
    const auto [dx_1, dw_1, db_1] = run(1);
    expect_equal("dx without the next row in flight", dx_1, dx);
    expect_equal("dw without the next row in flight", dw_1, dw);
    expect_equal("db without the next row in flight", db_1, db);
  }
  std::vector<double> gw(rows, 0), gw_hat(rows, 0), w_sum(n, 0), w_size(n, 0), b_sum(n, 0);
  for (int64_t i = 0; i < rows * n; ++i) {
    const double g = c.g(i), d = g * c.hat(i);
    if (kCentred) gw[i / n] += g * c.w(i) / n;
    gw_hat[i / n] += d * c.w(i) / n;
    w_sum[i % n] += d, w_size[i % n] += std::fabs(d) + std::fabs(g), b_sum[i % n] += g;
  }
  const double eps = kEps<A> * (16 + std::sqrt(n));
  expect_near<T>(
      "dx", dx,
      [&](int64_t i) {
        const int64_t r = i / n;
        const double more = wanted.grad_sum ? as_double(c.grad_sum[i]) : 0;
        return c.row[r].rstd * (c.g(i) * c.w(i) - gw[r] - c.hat(i) * gw_hat[r]) + more;
      },
      [&](int64_t i) { return eps * (c.row[i / n].rstd * (20 + 10 * std::fabs(c.hat(i))) + 3); });
  const auto bound = [&](int64_t j) { return kEps<A> * (8 + rows) * w_size[j]; };
  expect_near<W>(
      "dw", dw, [&](int64_t j) { return w_sum[j]; }, bound);
  if (kCentred)
    expect_near<W>(
        "db", db, [&](int64_t j) { return b_sum[j]; }, bound);
}

// In the next way of calling the kernels or, if the row must not fit the registers, in every one
template <typename T, typename W, bool kCentred>
void both(int64_t rows, int64_t n, int64_t shift, unsigned blocks = 1000, bool every = false) {
  Case<T, W, kCentred> c(rows, n, shift, blocks);
  c.fits = !every;
  constexpr int64_t kAll = 200 << 10;
  const int64_t rows_alone = 2 * ((n + 15) / 16 * 16) * int64_t{sizeof(T)};
  const std::pair<bool, int64_t> forwards[] = {{true, 0}, {false, kAll}, {true, kAll}, {false, 0}};
  const std::pair<Wanted, int64_t> backwards[] = {{{true, true, false}, kAll},
                                                  {{true, false, true}, kAll},
                                                  {{true, true, true}, rows_alone},
                                                  {{false, true, false}, kAll},
                                                  {{true, true, true}, 0}};
  static int turn = 0;
  for (int i = 0; i < (every ? 5 : 1); ++i, ++turn) {
    const int vectors[] = {0, 1, 2, 4};  // by the rule, and every choice of the table
    if (i < 4)
      forward(c, forwards[turn % 4].first, forwards[turn % 4].second,
              vectors[(turn + turn / 4) % 4]);
    backward(c, backwards[turn % 5].first, backwards[turn % 5].second, vectors[turn % 4]);
  }
}

// What the rule chooses, and that a choice that does not fit a row is not taken
void choices() {
  using T = BFloat16;
  current_case = "launches";
  ++cases;
  const auto vectors = [](int64_t n, bool centred, LaunchChoice tuned = {}) {
    return norm_bwd_launch<T>(n, true, centred, tuned).vectors;
  };
  if (norm_launch<T>(0, true).cached) wrong("an empty row has no vector to load");
  const auto forward_vectors = [](int64_t n, int kept) {
    return norm_fwd_launch<T>(n, true, {kept}).vectors;
  };
  if (forward_vectors(1024, 0) != 4 || forward_vectors(1024, 1) != 1 ||
      forward_vectors(8192, 1) != 4 || forward_vectors(8192, 2) != 2)
    wrong("vectors of the forward");
  if (vectors(1024, true) != 2 || vectors(1024, false) != 4) wrong("the rule, 1024");
  if (vectors(16384, true) != 4) wrong("a long row needs four vectors");
  if (vectors(1024, true, {1}) != 1 || vectors(1024, false, {2}) != 2) wrong("a choice is lost");
  if (vectors(8192, true, {1}) != 2 || vectors(1024, true, {3}) != 2) wrong("a choice is misread");
  if (norm_bwd_launch<float>(1024, true, true, {1}).vectors != 4) wrong("fp32 has one kernel");
  const auto staged = [](int64_t n, bool centred, LaunchChoice tuned = {}, bool adds = false,
                         int64_t limit = 160 << 10) {
    const NormLaunch launch = norm_bwd_launch<T>(n, true, centred, tuned, adds, limit);
    return std::pair(launch.stages, launch.vectors);
  };
  if (staged(1024, true) != std::pair(2, 2) || staged(1024, false) != std::pair(2, 4))
    wrong("the rule with the next row in flight");
  if (staged(4096, true) != std::pair(2, 2) || staged(4104, true).first != 1 ||
      staged(8192, false) != std::pair(2, 4) || staged(8200, false).first != 1)
    wrong("the widest rows with the next one in flight");
  if (staged(8192, false, {}, true, 99 << 10).first != 1) wrong("shared memory that is not there");
  if (staged(1024, true, {1}) != std::pair(2, 1) || staged(1024, true, {4}) != std::pair(1, 4) ||
      staged(1024, false, {0, 0, 0, 0, 1}) != std::pair(1, 4))
    wrong("stages by choice");
  const NormLaunch ahead = norm_bwd_launch<T>(1024, true, true, {}, true, 160 << 10);
  if (norm_bwd_grid(ahead, 1 << 20, true, 132, {}, true, 160 << 10) != 132 * 10)
    wrong("blocks by registers, with the next row in flight");
  if (norm_bwd_grid(ahead, 1 << 20, true, 132, {}, true, 40 << 10) != 132 * 3)
    wrong("blocks by shared memory");
  const NormLaunch wide = norm_bwd_launch<T>(1024, true, true, {1});
  if (wide.width != 128 || wide.groups != 1) wrong("threads of a row");
  if (norm_bwd_grid(wide, 1 << 20, true, 132, {}) != 132 * 8) wrong("blocks by registers");
  if (norm_bwd_grid(wide, 1 << 20, true, 132, {0, 0, 0, 3}) != 132 * 3) wrong("blocks by choice");
  if (norm_bwd_grid(wide, 5, true, 132, {}) != 5) wrong("blocks without rows");
}

template <typename T, typename W>
void sizes() {
  constexpr int64_t N = kVec<T>;
  for (const int64_t shift : {int64_t{0}, N, int64_t{1}}) {
    both<T, W, true>(5, 3 * N, shift);        // several rows in a warp
    both<T, W, false>(300, 8 * N, shift, 2);  // and round the loop
    both<T, W, false>(3, 129 * N, shift, 2);  // two warps, not all lanes with work
    both<T, W, true>(3, 129 * N, shift, 1);
  }
  both<T, W, true>(2, 1, 0), both<T, W, false>(3, 5 * N + 3, 0);
}

// The last rows of a tensor of more than 2^31 elements
template <bool kLongRow>
void vast_norm() {
  using T = BFloat16;
  const int64_t n = kLongRow ? 16384 : 64, rows = (int64_t{1} << 31) / n + 100;
  current_case = "rms_norm over more than 2^31 elements";
  ++cases;
  T *const x = vast<T>(rows * n), *const y = vast<T>(rows * n), *const dx = vast<T>(rows * n);
  float* const rstd = vast<float>(rows);
  const auto weight = values<T>(n, 0, 3);
  for (int64_t i = (rows - 1) * n; i < rows * n; ++i) x[i] = T(2.f);
  const NormLaunch shape = norm_launch<T>(n, true);
  if (!shape.cached) wrong("a row that fits is not kept");
  // As many blocks as rows: each takes its one group of rows
  const unsigned blocks = static_cast<unsigned>((rows + shape.groups - 1) / shape.groups);
  const dim3 block(shape.width, shape.groups), last(blocks - 1, 0);
  launch(blocks, block,
         [&] {
           norm_fwd_kernel<T, T, false, kVec<T>, kNormCached, false>(
               x, nullptr, weight, nullptr, nullptr, y, nullptr, rstd, rows, n, 0.f, 0);
         },
         0, {last});
  launch(blocks, block,
         [&] {
           norm_bwd_kernel<T, T, false, kVec<T>, kNormCached, false>(
               x, x, nullptr, nullptr, nullptr, rstd, dx, nullptr, rows, n, 0, false);
         },
         0, {last});
  if (rstd[rows - 1] != 0.5f) wrong("rstd of the last row");
  for (int64_t i = 0; i < n; ++i)
    if (y[(rows - 1) * n + i].bits != weight[i].bits || as_double(dx[(rows - 1) * n + i]) != 0)
      wrong("the last row");
  unmap(x, rows * n), unmap(y, rows * n), unmap(dx, rows * n), unmap(rstd, rows);
}

int program(int, char**) {
  choices();
#ifdef EVERY_TYPE
  sizes<double, double>();
  both<Half, Half, true>(5, 24, 0);
#endif
  sizes<float, float>();
  sizes<BFloat16, BFloat16>();
  both<BFloat16, float, true>(5, 24, 0), both<BFloat16, float, false>(3, 8 * 129, 1);
  both<BFloat16, BFloat16, true>(3, 8 * 129, 0, 2, true);
  both<float, float, false>(3, 4 * 129, 4, 1, true);
  vast_norm<true>();
  vast_norm<false>();
  return done();
}

}  // namespace emulation::norm
