// Norms over a last dim of n elements that is sharded over a group, as torch.tensor_split does.
//
//   rms    y = x rstd w           rstd = 1 / sqrt(sum(x^2) / n + eps)
//   layer  y = (x - mean) rstd w + b, mean and rstd of all n elements
//
//                 rms                                layer
//   forward       all-reduce of sum(x^2)             all-gather of sum(x), sum((x - own mean)^2)
//   backward      all-reduce of sum(dy w x)          all-reduce of sum(dy w), sum(dy w xhat)
//   per row       1 number                           2 numbers
//
// with sums over this rank's elements; the squared deviations of the ranks are merged as by Chan et
// al. (1979), so that no large squares cancel. The sum in backward overlaps the gradients of weight
// and bias. Statistics in fp32, for fp64 in fp64. Saved: x, w and the statistics.

#include <ATen/ops/rsqrt.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>

#include "autograd/autocast.h"
#include "autograd/function.h"
#include "check.h"
#include "comm/collectives.h"
#include "operators.h"
#include "rows.h"

namespace tp_ext {
namespace {

Tensor wide(const Tensor& x) { return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat); }
Tensor row_sum(const Tensor& x) { return x.sum(-1, /*keepdim=*/true); }
// dy times the weight, which may be missing
Tensor weighted(const Tensor& dy, const Tensor& weight) {
  return weight.defined() ? dy.mul(wide(weight)) : dy;
}

struct ShardedRmsNorm : Function<ShardedRmsNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& weight,
                        double eps, const std::string& group, int64_t n) {
    const Unrecorded guard(x);
    const Tensor wide_x = wide(x);
    const Tensor squares = comm::all_reduce_fresh(row_sum(wide_x.square()), group);
    const Tensor rstd = squares.div(static_cast<double>(n)).add(eps).rsqrt();
    ctx->save_for_backward({x, weight.value_or(Tensor()), rstd});
    ctx->saved_data["group"] = group, ctx->saved_data["n"] = n;
    const Tensor y = weighted(wide_x.mul(rstd), weight.value_or(Tensor()));
    return y.to(x.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward("rms_norm", grads);
    const auto saved = ctx->get_saved_variables();
    const auto group = ctx->saved_data["group"].toStringRef();
    const double n = static_cast<double>(ctx->saved_data["n"].toInt());
    const Unrecorded guard(grads[0]);
    const Tensor dy = wide(grads[0]), normed = wide(saved[0]).mul(saved[2]), &weight = saved[1];
    variable_list result = gradients();
    std::optional<comm::Pending> dot;
    Tensor g;
    if (ctx->needs_input_grad(0)) {
      g = weighted(dy, weight);
      dot.emplace(comm::all_reduce_async(row_sum(g.mul(normed)), group));
    }
    if (weight.defined() && ctx->needs_input_grad(1))
      result[1] = sum_to_last_dim(dy.mul(normed)).to(weight.scalar_type());
    if (dot)
      result[0] = g.sub(normed.mul(dot->wait().div(n))).mul(saved[2]).to(saved[0].scalar_type());
    return result;
  }
};

struct ShardedLayerNorm : Function<ShardedLayerNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, const std::string& group,
                        int64_t n) {
    const Unrecorded guard(x);
    const Tensor wide_x = wide(x);
    const auto [mean, rstd] = statistics(wide_x, eps, group, n);
    ctx->save_for_backward({x, weight.value_or(Tensor()), mean, rstd});
    ctx->saved_data["group"] = group, ctx->saved_data["n"] = n;
    if (has(bias)) ctx->saved_data["bias"] = static_cast<int64_t>(bias->scalar_type());
    Tensor y = weighted(wide_x.sub(mean).mul(rstd), weight.value_or(Tensor()));
    if (has(bias)) y = y.add(wide(*bias));
    return y.to(x.scalar_type());
  }

  static std::pair<Tensor, Tensor> statistics(const Tensor& x, double eps, const std::string& group,
                                              int64_t n) {
    const auto split = tensor_split(n, comm::size(group));
    const double own = std::max(1.0, length(split, comm::rank(group)));
    const Tensor total = row_sum(x);
    const Tensor deviations = row_sum(x.sub(total.div(own)).square());
    const Tensor all = comm::all_gather_stack(at::stack({total, deviations}), group);
    const Tensor mean = all.select(1, 0).sum(0).div(static_cast<double>(n));
    Tensor squares = all.select(1, 1).sum(0);
    for (int64_t k = 0; k < all.size(0); ++k)
      if (const double of_k = length(split, k); of_k > 0)
        squares = squares.add(all.select(0, k).select(0, 0).div(of_k).sub(mean).square(), of_k);
    return {mean, squares.div(static_cast<double>(n)).add(eps).rsqrt()};
  }
  static double length(const Split& split, int64_t k) {
    return static_cast<double>(split.sizes[k].guard_int(__FILE__, __LINE__));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward("layer_norm", grads);
    const auto saved = ctx->get_saved_variables();
    const auto group = ctx->saved_data["group"].toStringRef();
    const double n = static_cast<double>(ctx->saved_data["n"].toInt());
    const Unrecorded guard(grads[0]);
    const Tensor dy = wide(grads[0]), &weight = saved[1];
    const Tensor normed = wide(saved[0]).sub(saved[2]).mul(saved[3]);
    variable_list result = gradients();
    std::optional<comm::Pending> sums;
    Tensor g;
    if (ctx->needs_input_grad(0)) {
      g = weighted(dy, weight);
      sums.emplace(comm::all_reduce_async(at::stack({row_sum(g), row_sum(g.mul(normed))}), group));
    }
    // Autograd counts the defined inputs only: x, weight, bias
    if (weight.defined() && ctx->needs_input_grad(1))
      result[1] = sum_to_last_dim(dy.mul(normed)).to(weight.scalar_type());
    const auto bias = ctx->saved_data.find("bias");
    if (bias != ctx->saved_data.end() && ctx->needs_input_grad(1 + weight.defined()))
      result[2] = sum_to_last_dim(dy).to(static_cast<at::ScalarType>(bias->second.toInt()));
    if (sums) {
      const Tensor both = sums->wait().div(n);
      result[0] = g.sub(both[0]).sub(normed.mul(both[1])).mul(saved[3]).to(saved[0].scalar_type());
    }
    return result;
  }
};

void check(const Tensor& x, const OptionalTensor& weight, const std::string& group, int64_t n) {
  check_floating(x, "x");
  TORCH_CHECK_VALUE(x.dim() > 0, "x: shape ", x.sym_sizes(), " must have at least 1 dim");
  const auto share = tensor_split(n, comm::size(group)).sizes[comm::rank(group)];
  TORCH_CHECK_VALUE(x.sym_size(-1) == share, "x: shape ", x.sym_sizes(), " must end in ", share,
                    ", this rank's share of ", n, " features");
  TORCH_CHECK_VALUE(!has(weight) || (weight->dim() == 1 && weight->sym_size(0) == share),
                    "weight: must have ", share, " elements, this rank's share of ", n);
}

}  // namespace

Tensor sharded_rms_norm(const Tensor& x, const OptionalTensor& weight, double eps,
                        const std::string& group, int64_t n) {
  refuse_forward_mode("rms_norm", x, weight);
  check(x, weight, group, n);
  return ShardedRmsNorm::apply(x, weight, eps, group, n);
}

Tensor sharded_layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                          double eps, const std::string& group, int64_t n) {
  refuse_forward_mode("layer_norm", x, weight, bias);
  check(x, weight, group, n);
  return ShardedLayerNorm::apply(x, weight, bias, eps, group, n);
}

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  autocast_to_fp32_on_cuda<sharded_rms_norm, 0, 1>(m, "sharded_rms_norm");
  autocast_to_fp32_on_cuda<sharded_layer_norm, 0, 1, 2>(m, "sharded_layer_norm");
}

}  // namespace tp_ext
