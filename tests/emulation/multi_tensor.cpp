// Many tensors in one pass: the sum of their squares, their scaling, and their sum by a tree.

#include "harness.h"

#include "kernels/multi_tensor.cuh"
#include "kernels/tree_total.cuh"

using namespace emulation;
using namespace tp_ext;

namespace emulation::multi_tensor {

struct TensorSpec {
  int64_t n, shift;
};

TensorList list_of(const std::vector<void*>& data, const std::vector<TensorSpec>& specs) {
  TensorList list{};
  for (const TensorSpec& spec : specs) {
    const int k = list.count++;
    list.data[k] = data[k];
    list.numel[k] = spec.n;
    list.first_chunk[k + 1] = list.first_chunk[k] + static_cast<int32_t>(chunks_of_tensor(spec.n));
  }
  return list;
}

template <typename T>
void both(const std::vector<TensorSpec>& specs) {
  std::vector<Tensor<T>> tensors;
  long double want = 0;
  for (const TensorSpec& spec : specs)
    tensors.push_back(values<T>(spec.n, spec.shift, static_cast<unsigned>(tensors.size())));
  for (const auto& x : tensors)
    for (int64_t i = 0; i < x.size(); ++i) want += squared(x[i]);
  const auto name = std::string("many tensors ") + type_name<T>() + ", the first of " +
                    std::to_string(specs[0].n) + " shift " + std::to_string(specs[0].shift);
  const auto [total] = run_in_every_order(name + ", squares", [&] {
    std::vector<void*> data;
    for (const auto& x : tensors) data.push_back(x.data());
    const TensorList list = list_of(data, specs);
    const int32_t blocks = list.first_chunk[list.count];
    Tensor<double> partial(blocks), total(1);
    launch(blocks, kListThreads, [&] { squared_norm_kernel<T>(list, partial); });
    launch(1, kSumThreads, [&] { sum_of_partials_kernel(partial, blocks, total); });
    return results(total);
  });
  expect_near<double>(
      "squares", total, [&](int64_t) { return static_cast<double>(want); },
      [&](int64_t) { return 100 * kEps<double> * static_cast<double>(want); });

  for (const double scale : {0.3, 1.0}) {
    Tensor<double> factor(1);
    factor[0] = scale;
    const auto [joined] = run_in_every_order(name + ", scaled", [&] {
      std::vector<Tensor<T>> copies;
      std::vector<void*> data;
      int64_t all = 0;
      for (const auto& x : tensors) copies.push_back(x.copy()), all += x.size();
      for (const auto& x : copies) data.push_back(x.data());
      const TensorList list = list_of(data, specs);
      launch(list.first_chunk[list.count], kListThreads,
             [&] { multi_tensor_scale_kernel<T>(list, factor); });
      Tensor<T> joined(all);
      int64_t place = 0;
      for (const auto& x : copies)
        for (int64_t i = 0; i < x.size(); ++i) joined[place++] = x[i];
      return results(joined);
    });
    Tensor<T> want_joined(joined.size());
    int64_t place = 0;
    for (const auto& x : tensors)
      for (int64_t i = 0; i < x.size(); ++i)
        want_joined[place++] = scale == 1 ? x[i] : scaled(x[i], acc_t<T>(scale));
    expect_equal("x", joined, want_joined);
  }
}

template <typename T>
double square_of_one(int64_t n, int64_t shift) {
  const auto x = values<T>(n, shift);
  const TensorList list = list_of({x.data()}, {{n, shift}});
  Tensor<double> partial(list.first_chunk[1]);
  launch(list.first_chunk[1], kListThreads, [&] { squared_norm_kernel<T>(list, partial); });
  return partial[0];
}

// The last chunk of a tensor of more than 2^31 elements, behind another
void vast_squares() {
  using T = BFloat16;
  const int64_t n = (int64_t{1} << 31) + 3;
  current_case = "squares of more than 2^31 elements";
  ++cases;
  T* const x = vast<T>(n);
  x[n - 1] = T(3.f);
  T one(1.f);
  const TensorList list = list_of({&one, x}, {{1, 0}, {n, 0}});
  const int32_t blocks = list.first_chunk[2];
  double* const partial = vast<double>(blocks);
  launch(blocks, kListThreads, [&] { squared_norm_kernel<T>(list, partial); }, 0,
         {dim3(0, 0), dim3(blocks - 1, 0)});
  if (partial[0] != 1 || partial[blocks - 1] != 9) wrong("the first or last chunk");
  unmap(x, n), unmap(partial, blocks);
}

// A tree as a stack in plain loops, of n elements, by blocks that go round their loops
template <typename T>
void tree(const std::vector<uint8_t>& after, int64_t n) {
  using A = acc_t<T>;
  const auto count = static_cast<int64_t>(after.size());
  const auto nodes = values<A>(count * n);
  TreeJoins joins{static_cast<int>(count), {}};
  std::copy(after.begin(), after.end(), joins.after);
  Tensor<T> want(n);
  for (int64_t i = 0; i < n; ++i) {
    std::vector<A> waiting;
    for (int64_t k = 0; k < count; ++k) {
      A sum = nodes[k * n + i];
      for (int left = after[k]; left > 0; --left, waiting.pop_back()) sum = waiting.back() + sum;
      waiting.push_back(sum);
    }
    want[i] = from_acc<T>(waiting[0]);
  }
  const auto name = std::string("a tree of ") + std::to_string(count) + " nodes " + type_name<T>();
  const auto [root] = run_in_every_order(name, [&] {
    Tensor<T> root(n);
    launch(std::min(grid_for(n), 2), kTreeThreads,
           [&] { tree_total_kernel<T>(nodes, root, n, joins); });
    return results(root);
  });
  expect_equal("root", root, want);
}

int program(int, char**) {
  for_all_types([](auto type) {
    using T = decltype(type);
    constexpr int64_t N = kVec<T>;
    both<T>({{1, 0}});
    both<T>({{N, 1}, {N - 1, 0}, {3 * N + 1, 0}, {3 * N + 1, 1}});
    both<T>({{kTensorChunk + 1, 0}, {700, N}, {kTensorChunk, 1}});
    for (const int64_t n : {5 * N, 300 * N + 1})
      if (square_of_one<T>(n, 0) != square_of_one<T>(n, 1)) wrong("an address changes a sum");
    tree<T>({0}, 3);
    tree<T>({0, 1, 0, 2, 0, 1, 2}, 3 * kTreeThreads + 1);
  });
  both<float>(std::vector<TensorSpec>(kListTensors, {5, 0}));
  vast_squares();
  return done();
}

}  // namespace emulation::multi_tensor
