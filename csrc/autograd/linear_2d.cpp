// The linears of a mesh of two axes: the weight is sharded on both dims, one over `group` (y) as in
// linear.cpp, the other over `weight_group` (x), whose ranks have different rows of x. The weight
// is gathered over x for use; its gradient is summed over x and scattered.
//
//        column: weight [out / y, in / x]          row: weight [out / x, in / y]
//   y    (enter x) (gather w)^T + b                 leave (x (gather w)^T) + b
//   dx   enter^T (dy (gather w))                    (leave^T dy) (gather w)
//   dw   reduce-scatter over x of dy^T (enter x)    reduce-scatter over x of (leave^T dy)^T x
//
//   activations    enter             enter^T                  leave             leave^T
//   "replicated"   -                 sum over y               sum over y        -
//   "tokens"       gather dim 0      reduce-scatter dim 0     reduce-scatter    gather dim 0
//   "hidden"       gather last dim   reduce-scatter last dim  reduce-scatter    gather last dim
//
// Saved: the shards of x and of w, each only if the other's gradient may be needed: with "hidden",
// 1/(xy) of the full tensors. reshard_after_forward=false also saves the gathered w and the
// gathered x (column), and backward does not gather them again. Overlap: the gather of the next
// weight (weight_gather.h) with the GEMMs of this linear, forward and backward; the sum of dx
// (column) with the GEMM of dw; the reduce-scatter of dw (row) with the GEMM of dx. The bias is
// sharded over x, too, gathered for use and its gradient scattered. Double backward and forward
// mode are composed of regions and matmuls. In a backward in two halves (split_backward.h) the row
// linear keeps the gathered dy.

#include <ATen/ops/add.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>

#include "autograd/autocast.h"
#include "autograd/exchange.h"
#include "autograd/linear_checks.h"
#include "autograd/linear_overlap.h"
#include "autograd/split_backward.h"
#include "autograd/weight_gather.h"
#include "products.h"

namespace tp_ext {
namespace {

// How one call is sharded: the bias over the group of the weight
struct Sharded {
  Exchange activations;
  Exchange bias;
  WeightShards weight;
  bool row = false, has_bias = false;

  auto fields() {
    return std::tuple_cat(activations.fields(), bias.fields(),
                          std::tie(weight.group, weight.split, weight.dim, row, has_bias));
  }
};

Tensor weight_region(const Tensor& weight, const Sharded& s) {
  return TP_OP(all_gather_region)
      .call(weight, s.weight.group, s.weight.dim, c10::SymIntArrayRef(s.weight.split.sizes));
}
Tensor weight_grad_region(const Tensor& dw, const Sharded& s) {
  return TP_OP(reduce_scatter_region)
      .call(dw, s.weight.group, s.weight.dim, c10::SymIntArrayRef(s.weight.split.sizes));
}

struct Linear2d : Function<Linear2d> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const Sharded& s, bool reshard_after_forward) {
    put_call(ctx, s);
    const Unrecorded guard(x);
    auto bias_full = s.bias.gather_async(bias.value_or(Tensor()));
    auto x_pending = s.row ? comm::Pending(x, nullptr) : s.activations.gather_async(x);
    const auto order = GatherOrder::running(weight);
    if (order) ctx->saved_data["order"] = c10::IValue::make_capsule(order);
    const Tensor w = gathered_weight(weight, s.weight, order);
    const Tensor x_full = x_pending.wait();
    variable_list saved = operands(x, weight);
    if (!reshard_after_forward) {
      saved.push_back(weight.requires_grad() ? x_full : Tensor());
      saved.push_back(x.requires_grad() ? w : Tensor());
    }
    ctx->save_for_backward(std::move(saved));
    const Tensor b = s.row ? Tensor() : bias_full.wait();
    const Tensor y = products::linear(x_full, w, optional(b));
    if (!s.row) return y;
    return plus_bias(s.activations.sum(y), optional(bias_full.wait()));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Backward b(ctx, grads[0]);
    const Sharded& s = b.s;
    const bool wants_b = s.has_bias && ctx->needs_input_grad(2);
    variable_list result = gradients();
    if (at::GradMode::is_enabled() || has_tangent(b.dy)) {
      const Tensor dy = s.row ? s.activations.gather_region(b.dy) : b.dy;
      if (wants_b) result[2] = s.bias.sum_region(as_rows(b.dy).sum(0));
      if (b.wants_x) {
        result[0] = at::matmul(dy, weight_region(b.weight, s));
        if (!s.row) result[0] = s.activations.sum_region(result[0]);
      }
      if (b.wants_w)
        result[1] =
            weight_grad_region(weight_grad(dy, s.row ? b.x : s.activations.gather_region(b.x)), s);
      return result;
    }
    const Unrecorded guard(b.dy);
    std::optional<comm::Pending> db;
    if (wants_b) db.emplace(s.bias.sum_async(as_rows(b.dy).sum(0)));
    s.row ? row_gradients(b, result) : column_gradients(b, result);
    if (wants_b) result[2] = db->wait();
    return result;
  }

  struct Backward {
    Backward(AutogradContext* ctx, const Tensor& dy)
        : ctx(ctx),
          s(get_call<Sharded>(ctx)),
          wants_x(ctx->needs_input_grad(0)),
          wants_w(ctx->needs_input_grad(1)),
          dy(dy) {
      auto saved = ctx->get_saved_variables();
      saved.resize(4);
      x = saved[0], weight = saved[1], kept_x = saved[2], kept_w = saved[3];
    }

    // The gathered weight, kept since forward or gathered again
    Tensor weight_for_dx() const {
      if (kept_w.defined()) return kept_w;
      const auto& data = ctx->saved_data;
      const auto order = data.find("order");
      return gathered_weight(weight, s.weight,
                             order == data.end() ? nullptr
                                                 : c10::dynamic_intrusive_pointer_cast<GatherOrder>(
                                                       order->second.toCapsule()));
    }

    AutogradContext* const ctx;
    const Sharded s;
    const bool wants_x, wants_w;
    const Tensor& dy;
    Tensor x, weight, kept_x, kept_w;
  };

  static void column_gradients(const Backward& b, variable_list& result) {
    std::optional<comm::Pending> x_full, dx;
    if (b.wants_w)
      x_full.emplace(b.kept_x.defined() ? comm::Pending(b.kept_x, nullptr)
                                        : b.s.activations.gather_async(b.x));
    if (b.wants_x) dx.emplace(b.s.activations.sum_async(input_grad(b.dy, b.weight_for_dx())));
    if (b.wants_w) result[1] = scattered(weight_grad(b.dy, x_full->wait()), b.s).wait();
    if (b.wants_x) result[0] = dx->wait();
  }

  static void row_gradients(const Backward& b, variable_list& result) {
    const bool keeps_dy = b.s.activations.cut() && b.wants_x && asked_later(b.ctx, 1);
    const auto kept = b.s.activations.cut() && b.wants_w && !b.wants_x ? take_results(b.ctx, b.dy)
                                                                       : variable_list();
    std::optional<comm::Pending> dy_full, dw;
    if (kept.empty()) dy_full.emplace(b.s.activations.gather_async(b.dy));
    const Tensor w = b.wants_x ? b.weight_for_dx() : Tensor();
    const Tensor dy = kept.empty() ? dy_full->wait() : kept[0];
    if (keeps_dy) keep_results(b.ctx, b.dy, {dy});
    // Before the GEMM of dx, which the reduce-scatter overlaps
    if (b.wants_w) dw.emplace(scattered(weight_grad(dy, b.x), b.s));
    if (b.wants_x) result[0] = input_grad(dy, w);
    if (b.wants_w) result[1] = dw->wait();
  }

  static comm::Pending scattered(const Tensor& dw, const Sharded& s) {
    if (s.weight.split.sizes.size() == 1) return comm::Pending(dw, nullptr);
    return comm::reduce_scatter_async(dw, s.weight.group, s.weight.dim, s.weight.split);
  }
};

void check_linear_2d(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                     const std::string& activations) {
  check_floating(x, "x");
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: shape ", weight.sym_sizes(), " must have 2 dims");
  TORCH_CHECK_VALUE(x.dim() > 0, "x: shape ", x.sym_sizes(), " must have at least 1 dim");
  TORCH_CHECK_VALUE(
      activations == "replicated" || activations == "tokens" || activations == "hidden",
      "activations: '", activations, "' must be 'replicated', 'tokens' or 'hidden'");
  check_same_dtype(weight, "weight", x, "x");
  check_same_device(weight, "weight", x, "x");
  if (bias.has_value()) check_same_dtype(*bias, "bias", x, "x");
}

void check_last(const char* name, const SymInt& own, const SymInt& right, const char* what) {
  TORCH_CHECK_VALUE(own == right, name, ": ", own, " elements in the last dim must be ", right,
                    ", ", what);
}

}  // namespace

Tensor linear_2d(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                 const std::string& group, const std::string& weight_group, SymInt weight_size,
                 bool row, const std::string& activations, Sizes sizes,
                 bool reshard_after_forward) {
  check_linear_2d(x, weight, bias, activations);
  const int64_t p = comm::size(group), rank = comm::rank(group);
  const bool tokens = p > 1 && activations == "tokens", hidden = p > 1 && activations == "hidden";
  Sharded s{
      {group, Split(), tokens ? 0 : -1},
      {weight_group},
      WeightShards{weight_group, row ? 0 : 1, tensor_split(weight_size, comm::size(weight_group))},
      row,
      bias.has_value()};
  const auto share = s.weight.split.sizes[comm::rank(weight_group)];
  TORCH_CHECK_VALUE(weight.sym_size(s.weight.dim) == share, "weight: shape ", weight.sym_sizes(),
                    " must have ", share, " elements in dim ", s.weight.dim,
                    ", this rank's share of ", weight_size);
  Split& split = s.activations.split;
  if (hidden) split = tensor_split(weight_size, p);
  if (tokens)
    split = row ? split_full(tokens_of(x), p, sizes) : split_local(tokens_of(x), rank, p, sizes);
  if (row)
    check_last("x", x.sym_size(-1), weight.sym_size(1), "the input features on this rank");
  else if (hidden)
    check_last("x", x.sym_size(-1), split.sizes[rank], "this rank's share of the features");
  else
    check_last("x", x.sym_size(-1), weight_size, "the input features");
  if (bias.has_value()) {
    const auto added = !row ? weight.sym_size(0) : hidden ? split.sizes[rank] : weight_size;
    const auto shares = tensor_split(added, comm::size(weight_group));
    TORCH_CHECK_VALUE(
        bias->dim() == 1 && bias->sym_size(0) == shares.sizes[comm::rank(weight_group)],
        "bias: shape ", bias->sym_sizes(), " must be this rank's share of ", added,
        " output features");
    if (shares.sizes.size() > 1) s.bias.split = shares;
  }
  if (any_tangent(x, weight, bias)) {
    const Tensor w = weight_region(weight, s);
    const auto b = bias.has_value() ? OptionalTensor(s.bias.gather_region(*bias)) : std::nullopt;
    if (!row) return at::linear(s.activations.gather_region(x), w, b);
    const Tensor y = s.activations.sum_region(at::linear(x, w));
    return b.has_value() ? at::add(y, *b) : y;
  }
  return Linear2d::apply(x, weight, bias, s, reshard_after_forward);
}

namespace {

// The weight may be a cast for this call alone, whose gather no later call can use
template <c10::DeviceType device>
Tensor autocast(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                const std::string& group, const std::string& weight_group, SymInt weight_size,
                bool row, const std::string& activations, Sizes sizes, bool reshard_after_forward) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKey<device>);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const auto& t) { return at::autocast::cached_cast(dtype, t, device); };
  const Tensor w = cast(weight);
  std::optional<MadeForOneCall> made;
  if (!w.is_same(weight)) made.emplace();
  return linear_2d(cast(x), w, cast(bias), group, weight_group, weight_size, row, activations,
                   sizes, reshard_after_forward);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  impl_composite<linear_2d>(m, "linear_2d");
  impl_autocast<c10::kCPU, autocast<c10::kCPU>>(m, "linear_2d");
  impl_autocast<c10::kCUDA, autocast<c10::kCUDA>>(m, "linear_2d");
}

}  // namespace tp_ext
