// CPU: the root of a tree of nodes, chunk by chunk: a chunk's sums that wait stay in the cache.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "args/tree_total.h"
#include "cpu/dispatch.h"
#include "kernels/scalar.h"

namespace tp_ext {
namespace {

constexpr int64_t kTotalChunk = 1024;  // elements of a chunk

template <typename A>
TP_MULTIVERSION void add(A* sum, const A* left, const A* right, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] = left[i] + right[i];
}

template <typename T>
TP_MULTIVERSION void round_to(T* out, const acc_t<T>* sum, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = from_acc<T>(sum[i]);
}

at::Tensor tree_total(const at::Tensor& given, at::IntArrayRef joins, at::ScalarType dtype) {
  const int64_t depth = check_tree_total(given, joins, dtype);
  const at::Tensor nodes = given.contiguous();
  const at::Tensor root = at::empty(nodes.sizes().slice(1), nodes.options().dtype(dtype));
  const int64_t n = root.numel(), chunks = (n + kTotalChunk - 1) / kTotalChunk;
  dispatch_floating(dtype, "tree_total", [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const int64_t grain = rows_per_thread(kTotalChunk * nodes.size(0));
    at::parallel_for(0, chunks, grain, [&](int64_t from, int64_t to) {
      std::vector<A> memory(depth * kTotalChunk);
      std::vector<const A*> waiting(depth);
      for (int64_t c = from; c < to; ++c) {
        const int64_t first = c * kTotalChunk, count = std::min(kTotalChunk, n - first);
        int64_t top = 0;
        for (size_t k = 0; k < joins.size(); ++k) {
          const A* sum = in<A>(nodes) + static_cast<int64_t>(k) * n + first;
          for (int64_t left = joins[k]; left > 0; --left) {
            --top;
            A* const place = memory.data() + top * kTotalChunk;
            add(place, waiting[top], sum, count);
            sum = place;
          }
          waiting[top++] = sum;
        }
        round_to(out<T>(root) + first, waiting[0], count);
      }
    });
  });
  return root;
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) { m.impl("_tree_total", tree_total); }

}  // namespace tp_ext
