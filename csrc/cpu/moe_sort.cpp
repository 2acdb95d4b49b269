// moe_sort on the CPU: a stable counting sort of the slots by expert. One thread: a slot is one
// number, the row of x that moves because of it thousands.

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "args/moe_permute.h"

namespace tp_ext {
namespace {

std::tuple<Tensor, Tensor> moe_sort(const Tensor& experts_any, int64_t num_experts) {
  check_moe_sort(experts_any, num_experts);
  const Tensor experts = experts_any.contiguous();
  const Tensor rows = at::empty_like(experts);
  const Tensor counts = at::zeros({num_experts}, experts.options());
  const int64_t slots = experts.numel();
  const auto* expert = in<int64_t>(experts);
  auto *row = out<int64_t>(rows), *count = out<int64_t>(counts);
  for (int64_t s = 0; s < slots; ++s) {
    TORCH_CHECK_INDEX(expert[s] >= -1 && expert[s] < num_experts, "experts: ", expert[s],
                      " must be -1 or in [0, num_experts), [0, ", num_experts, ")");
    if (expert[s] >= 0) ++count[expert[s]];
  }
  std::vector<int64_t> next(num_experts, 0);  // the row of the next slot of each expert
  for (int64_t e = 1; e < num_experts; ++e) next[e] = next[e - 1] + count[e - 1];
  for (int64_t s = 0; s < slots; ++s) row[s] = expert[s] >= 0 ? next[expert[s]]++ : -1;
  return {rows, counts};
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) { m.impl("_moe_sort", moe_sort); }

}  // namespace tp_ext
