// The root of a tree of nodes on CUDA.

#include "kernels/tree_total.cuh"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "args/tree_total.h"
#include "cuda/launch.h"

namespace tp_ext {
namespace {

// More nodes than a launch takes
at::Tensor tree_of_many(const at::Tensor& nodes, at::IntArrayRef numbers, at::ScalarType dtype) {
  std::vector<at::Tensor> waiting;
  for (size_t k = 0; k < numbers.size(); ++k) {
    at::Tensor sum = nodes.select(0, static_cast<int64_t>(k));
    for (int64_t left = numbers[k]; left > 0; --left) {
      sum = at::add(waiting.back(), sum);
      waiting.pop_back();
    }
    waiting.push_back(std::move(sum));
  }
  return waiting[0].to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

at::Tensor tree_total(const at::Tensor& given, at::IntArrayRef numbers, at::ScalarType dtype) {
  const int64_t depth = check_tree_total(given, numbers, dtype);
  const c10::cuda::CUDAGuard guard(given.device());
  const at::Tensor nodes = given.contiguous();
  if (numbers.size() > kTreeNodes || depth > kTreeDepth) return tree_of_many(nodes, numbers, dtype);
  TreeJoins joins{static_cast<int>(numbers.size()), {}};
  std::copy(numbers.begin(), numbers.end(), joins.after);
  const at::Tensor root = at::empty(nodes.sizes().slice(1), nodes.options().dtype(dtype));
  const int64_t n = root.numel();
  if (n == 0) return root;
  dispatch_floating(dtype, "tree_total", [&](auto zero) {
    using T = decltype(zero);
    tree_total_kernel<T><<<grid_for(n), kTreeThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        in<acc_t<T>>(nodes), out<T>(root), n, joins);
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return root;
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) { m.impl("_tree_total", tree_total); }

}  // namespace tp_ext
