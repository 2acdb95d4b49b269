// Tokens to the rows of their experts and back, and the order of the rows.

#include "harness.h"

#include "kernels/moe_permute.cuh"
#include "kernels/moe_sort.cuh"

using namespace emulation;
using namespace tp_ext;

namespace emulation::experts {

struct InRange {
  void operator()(bool ok) const {
    if (!ok) wrong("out of range");
  }
};

template <typename T, int N>
void permute(MoeShape shape, int blocks, bool weighted, int64_t shift = 0) {
  using A = acc_t<T>;
  const auto [tokens, choices, rows, hidden] = shape;
  const int64_t slots = tokens * choices;
  const auto x = values<T>(tokens * hidden, shift, 1), y = values<T>(rows * hidden, shift, 2);
  const auto weights = values<A>(slots, 0, 3);
  const A* const given = weighted ? weights.data() : nullptr;
  Tensor<int64_t> row_of(slots);  // 7 is prime to the number of rows; every fourth slot is dropped
  for (int64_t s = 0; s < slots; ++s) row_of[s] = s % 4 == 1 || s >= rows ? -1 : s * 7 % rows;

  Tensor<T> want_y(rows * hidden, shift), want_x(tokens * hidden, shift);
  Tensor<A> want_dot(slots);
  Tensor<int64_t> want_slots(rows);
  std::fill_n(want_y.data(), rows * hidden, from_acc<T>(A(0)));
  std::fill_n(want_slots.data(), rows, -1);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < hidden; ++i) {
      A sum = 0;
      for (int64_t s = t * choices; s < (t + 1) * choices; ++s) {
        if (row_of[s] < 0) continue;
        want_slots[row_of[s]] = s;
        const A weight = weighted ? weights[s] : A(1);
        want_y[row_of[s] * hidden + i] = from_acc<T>(weight * to_acc(x[t * hidden + i]));
        sum += weight * to_acc(y[row_of[s] * hidden + i]);
      }
      want_x[t * hidden + i] = from_acc<T>(sum);
    }

  const auto name = std::string("experts ") + type_name<T>() + " " + std::to_string(tokens) +
                    " x " + std::to_string(choices) + " x " + std::to_string(hidden) + " N " +
                    std::to_string(N) + (weighted ? " weighted" : "");
  const auto grid = [&](int64_t threads) { return std::min(grid_for(threads), blocks); };
  const auto [slot_of, to_rows, back, dot, dy, dweights] = run_in_every_order(name, [&] {
    Tensor<int64_t> slot_of(rows);
    std::fill_n(slot_of.data(), rows, -1);
    Tensor<T> to_rows(rows * hidden, shift), back(tokens * hidden, shift), dy(rows * hidden, shift);
    Tensor<A> dot(slots), dweights(slots);
    launch(grid(slots), kThreads,
           [&] { moe_slots_kernel(row_of.data(), slots, rows, slot_of, InRange()); });
    launch(grid(moe_permute_threads<N>(shape)), kThreads,
           [&] { moe_permute_kernel<N, T>(x, row_of, given, slot_of, shape, to_rows, InRange()); });
    launch(grid(warp_row_threads<N>(tokens, hidden, kParts)), kThreads,
           [&] { moe_unpermute_kernel<N, T>(y, row_of, given, shape, back, InRange()); });
    launch(grid(slots * kWarp), kThreads, [&] {
      moe_dot_kernel<N, false, T>(x, y, row_of, nullptr, nullptr, shape, nullptr, dot, InRange());
    });
    launch(grid((slots + rows) * kWarp), kThreads, [&] {
      moe_dot_kernel<N, true, T>(x, y, row_of, weights, slot_of, shape, dy, dweights, InRange());
    });
    return results(slot_of, to_rows, back, dot, dy, dweights);
  });
  expect_equal("slots", slot_of, want_slots);
  expect_equal("y", to_rows, want_y);
  expect_equal("x", back, want_x);
  expect_equal("dweights", dweights, dot);
  if (weighted) expect_equal("dy", dy, want_y);
  const auto product = [&](int64_t s, bool size) {
    double sum = 0;
    for (int64_t i = 0; i < hidden && row_of[s] >= 0; ++i) {
      const double term =
          as_double(x[s / choices * hidden + i]) * as_double(y[row_of[s] * hidden + i]);
      sum += size ? std::fabs(term) : term;
    }
    return sum;
  };
  expect_near<A>(
      "dot", dot, [&](int64_t s) { return product(s, false); },
      [&](int64_t s) { return 32 * kEps<A> * product(s, true); });
}

void sort(int64_t slots, int64_t num_experts, int blocks) {
  Tensor<int64_t> experts(slots), order(slots), want_rows(slots), want_counts(num_experts);
  Random random{5};
  std::fill_n(want_counts.data(), num_experts, 0);
  for (int64_t s = 0; s < slots; ++s) {
    experts[s] = static_cast<int64_t>(random() % (num_experts + 1)) - 1;
    if (experts[s] == num_experts / 2) experts[s] = 0;  // one without rows
    order[s] = s;
    want_rows[s] = -1;
    if (experts[s] >= 0) ++want_counts[experts[s]];
  }
  const auto name = "sort of " + std::to_string(slots) + " by " + std::to_string(num_experts);
  const auto key = [&](int64_t s) { return experts[s] < 0 ? num_experts : experts[s]; };
  std::stable_sort(order.data(), order.data() + slots,
                   [&](int64_t a, int64_t b) { return key(a) < key(b); });
  for (int64_t i = 0; i < slots; ++i)
    if (experts[order[i]] >= 0) want_rows[order[i]] = i;
  const auto [keys, rows, counts] = run_in_every_order(name, [&] {
    Tensor<int32_t> keys(slots), sorted(slots);
    Tensor<int64_t> rows(slots), counts(num_experts);
    launch(std::min(grid_for(slots), blocks), kThreads,
           [&] { moe_keys_kernel(experts.data(), slots, num_experts, keys, InRange()); });
    for (int64_t i = 0; i < slots; ++i) sorted[i] = keys[order[i]];
    launch(std::min(grid_for(std::max(slots, num_experts)), blocks), kThreads,
           [&] { moe_rows_kernel(sorted, order, slots, num_experts, rows, counts); });
    return results(keys, rows, counts);
  });
  for (int64_t s = 0; s < slots; ++s)
    if (keys[s] != key(s)) wrong("the key of a slot");
  expect_equal("rows", rows, want_rows);
  expect_equal("counts", counts, want_counts);
}

// The last row, beyond 2^31 elements
void vast_permute() {
  using T = BFloat16;
  constexpr int N = kVec<T>;
  const int64_t hidden = 8192, rows = (int64_t{1} << 31) / hidden + 5, size = rows * hidden;
  const MoeShape shape{1, 1, rows, hidden};
  current_case = "a permutation to more than 2^31 elements";
  ++cases;
  T* const y = vast<T>(size);
  auto* const slot_of = vast<int64_t>(rows);
  slot_of[rows - 1] = 0;
  Tensor<int64_t> row_of(1);
  row_of[0] = rows - 1;
  const auto x = values<T>(hidden, 0, 1);
  const unsigned warps = grid_for(moe_permute_threads<N>(shape)) * (kThreads / kWarp);
  const unsigned last =
      (moe_permute_threads<N>(shape) / kWarp - 1) % warps;  // the end of the token
  launch(grid_for(moe_permute_threads<N>(shape)), kThreads,
         [&] { moe_permute_kernel<N, T>(x.data(), row_of, nullptr, slot_of, shape, y, InRange()); },
         0, {dim3(last / (kThreads / kWarp))});
  Tensor<T> back(hidden);
  launch(4, kThreads,
         [&] { moe_unpermute_kernel<N, T>(y, row_of, nullptr, shape, back, InRange()); });
  if (y[size - 1].bits != x[hidden - 1].bits || back[hidden - 1].bits != x[hidden - 1].bits)
    wrong("the last element");
  unmap(y, size), unmap(slot_of, rows);
}

int program(int, char**) {
  for_all_types([](auto zero) {
    using T = decltype(zero);
    constexpr int N = kVec<T>;
    permute<T, N>({5, 2, 9, 33 * N}, 4, true), permute<T, N>({5, 2, 9, N}, 1, false);
    permute<T, N>({3, 2, 70, 163 * N}, 2, true), permute<T, N>({1, 35, 40, 128 * N}, 1, true);
    permute<T, N>({3, 6, 20, 2 * N}, 2, true), permute<T, 1>({3, 5, 12, 35}, 3, true, 1);
    permute<T, 1>({1, 1, 3, 1}, 1, false);
  });
  permute<float, 4>({2, 0, 3, 8}, 1, false);
  sort(1, 1, 1), sort(700, 5, 2), sort(300, 520, 1), sort(1000, 8, 9);
  vast_permute();
  return done();
}

}  // namespace emulation::experts
