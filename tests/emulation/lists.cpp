// Lists of tensors: the sum of their squares, and their scaling.

#include "harness.h"

#include "kernels/multi_tensor.cuh"

using namespace emulation;
using namespace tp_ext;

namespace {

// As the launcher makes it
template <typename T>
TensorList list_of(const std::vector<Tensor<T>>& xs) {
  TensorList list{};
  for (const auto& x : xs) {
    if (x.size() == 0) continue;
    list.data[list.count] = x.data();
    list.numel[list.count] = x.size();
    list.first_chunk[list.count + 1] =
        list.first_chunk[list.count] + static_cast<int32_t>(chunks_of_tensor(x.size()));
    ++list.count;
  }
  return list;
}

template <typename T>
void lists(const std::vector<int64_t>& lengths, int64_t shift) {
  std::vector<Tensor<T>> xs;
  for (size_t t = 0; t < lengths.size(); ++t)
    xs.push_back(values<T>(lengths[t], shift, static_cast<unsigned>(t + 1)));
  const auto name = std::string("lists ") + type_name<T>() + ", " + std::to_string(lengths.size()) +
                    " from " + std::to_string(lengths[0]) + " on, shift " + std::to_string(shift);
  const TensorList list = list_of(xs);
  const int32_t blocks = list.first_chunk[list.count];
  double want = 0;
  for (const auto& x : xs)
    for (int64_t i = 0; i < x.size(); ++i) want += as_double(x[i]) * as_double(x[i]);
  const auto [total] = run_in_every_order(name, [&] {
    Tensor<double> partial(blocks), total(1);
    launch(blocks, kListThreads, [&] { squared_norm_kernel<T>(list, partial); });
    launch(1, kSumThreads, [&] { sum_of_partials_kernel(partial, blocks, total); });
    return results(total);
  });
  if (!(std::fabs(total[0] - want) <= 1e-13 * want)) wrong("squared norm");
  for (const double factor : {1.0, 0.3, -2.0}) {
    Tensor<double> scale(1);
    scale[0] = factor;
    for (const Order one : {Order::kAscending, Order::kShuffled}) {
      order = one;
      std::vector<Tensor<T>> copies;
      for (const auto& x : xs) copies.push_back(x.copy());
      const TensorList written = list_of(copies);
      launch(blocks, kListThreads, [&] { multi_tensor_scale_kernel<T>(written, scale); });
      for (size_t t = 0; t < xs.size(); ++t) {
        Tensor<T> scaled_x(xs[t].size());
        for (int64_t i = 0; i < scaled_x.size(); ++i)
          scaled_x[i] = scaled(xs[t][i], static_cast<acc_t<T>>(factor));
        expect_equal("scaled", copies[t], scaled_x);
      }
    }
  }
}

// The search for a block's tensor, where the numbers are large
void chunks() {
  current_case = "chunks of a list";
  ++cases;
  TensorList list{};
  const int64_t lengths[] = {1, kTensorChunk, kTensorChunk + 1, (int64_t{1} << 33) + 5, 2};
  for (const int64_t n : lengths) {
    list.numel[list.count] = n;
    list.first_chunk[list.count + 1] =
        list.first_chunk[list.count] + static_cast<int32_t>(chunks_of_tensor(n));
    ++list.count;
  }
  int32_t chunk = 0;
  for (int t = 0; t < list.count; ++t)
    for (int64_t start = 0; start < lengths[t]; start += kTensorChunk, ++chunk) {
      const TensorChunk at = chunk_at(list, chunk);
      if (at.tensor != t || at.start != start ||
          at.length != std::min(kTensorChunk, lengths[t] - start))
        wrong("chunk " + std::to_string(chunk));
    }
}

}  // namespace

int main() {
  for_all_types([](auto tag) {
    using T = decltype(tag);
    for (const int64_t n : {1, 7, 8, 9, 255, 2049}) lists<T>({n}, 0);
    for (const int64_t shift : {0, 1, 3}) lists<T>({5, 16385, 1, 0, 300}, shift);
  });
  lists<float>(std::vector<int64_t>(kListTensors, 3), 1);
  chunks();
  return done();
}
