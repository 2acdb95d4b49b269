// The tensor-parallel linears. weight is [out_local, in] (column: its rows are sharded) or [out,
// in_local] (row: its columns are); n_local tokens of n under sequence parallelism (SP), the first
// dim then being the sharded one.
//
//                     column                               row
//   forward           y = [gather x] w^T + b               y = sum(x w^T) + b        SP:
//   reduce-scatter input gradient    dx = sum(dy w)   SP: reduce-scatter  dx = [gather dy] w weight
//   gradient   dw = dy^T [gather x]                 dw = [gather dy]^T x bias gradient     db = sum
//   of dy's rows                the same, under SP summed over ranks
//
// Saved: x as it came in (the shard) and w, each only if the other's gradient may be asked for.
// Column backward: the sum of dx runs under the GEMM of dw, and under SP the gather of x under the
// GEMM of dx. Row backward under SP: the sum of db runs under both GEMMs. Backward of backward is
// made of regions and matmuls, by the same table.

#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "autograd/regions.h"
#include "check.h"
#include "comm/comm.h"
#include "ops.h"

namespace tp_ext {
namespace {

using c10::SymInt;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

Tensor as_rows(const Tensor& x) {
  if (x.dim() == 2) return x;
  SymInt rows = 1;  // -1 would be ambiguous where a rank has no features
  for (int64_t dim = 0; dim < x.dim() - 1; ++dim) rows *= x.sym_size(dim);
  return x.reshape_symint({rows, x.sym_size(-1)});
}

Tensor input_grad(const Tensor& dy, const Tensor& weight) {
  if (dy.dim() == 2) return at::mm(dy, weight);
  auto shape = dy.sym_sizes().vec();
  shape.back() = weight.sym_size(1);
  return at::mm(as_rows(dy), weight).view_symint(shape);
}
Tensor weight_grad(const Tensor& dy, const Tensor& x) {
  return at::mm(as_rows(dy).t(), as_rows(x));
}
Tensor bias_grad(const Tensor& dy) { return as_rows(dy).sum(0); }

// What forward saves and backward finds again
struct Saved {
  Tensor x, weight;
  std::string group;
  bool sequence_parallel, has_bias;
  Split tokens;  // under SP: each rank's tokens

  static void put(AutogradContext* ctx, const Tensor& x, const Tensor& weight, bool has_bias,
                  const std::string& group, bool sequence_parallel, const Split& tokens) {
    ctx->save_for_backward(
        {weight.requires_grad() ? x : Tensor(), x.requires_grad() ? weight : Tensor()});
    ctx->saved_data["group"] = group;
    ctx->saved_data["sequence_parallel"] = sequence_parallel;
    ctx->saved_data["has_bias"] = has_bias;
    ctx->saved_data["tokens"] = c10::SymIntArrayRef(tokens.sizes);
  }
  static Saved get(AutogradContext* ctx) {
    const auto tensors = ctx->get_saved_variables();
    return {tensors[0],
            tensors[1],
            ctx->saved_data["group"].toStringRef(),
            ctx->saved_data["sequence_parallel"].toBool(),
            ctx->saved_data["has_bias"].toBool(),
            Split{ctx->saved_data["tokens"].toSymIntVector()}};
  }
};

variable_list gradients(Tensor dx, Tensor dw, Tensor db) {
  return {std::move(dx), std::move(dw), std::move(db), Tensor(), Tensor(), Tensor()};
}

struct ColumnLinear : Function<ColumnLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const std::string& group,
                        bool sequence_parallel, const Split& tokens) {
    Saved::put(ctx, x, weight, bias.has_value(), group, sequence_parallel, tokens);
    return at::linear(sequence_parallel ? comm::all_gather(x, group, 0, tokens) : x, weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto& dy = grads[0];
    const auto s = Saved::get(ctx);
    const bool wants_x = ctx->needs_input_grad(0), wants_w = ctx->needs_input_grad(1);
    const Tensor db = s.has_bias && ctx->needs_input_grad(2) ? bias_grad(dy) : Tensor();
    if (at::GradMode::is_enabled()) return differentiable(dy, s, wants_x, wants_w, db);

    std::optional<comm::Pending> x_full, dx;
    if (wants_w && s.sequence_parallel)
      x_full.emplace(comm::all_gather_async(s.x, s.group, 0, s.tokens));
    if (wants_x) {
      const Tensor addend = input_grad(dy, s.weight);
      dx.emplace(s.sequence_parallel ? comm::reduce_scatter_async(addend, s.group, 0, s.tokens)
                                     : comm::all_reduce_async(addend, s.group));
    }
    const Tensor dw = wants_w ? weight_grad(dy, x_full ? x_full->wait() : s.x) : Tensor();
    return gradients(dx ? dx->wait() : Tensor(), dw, db);
  }

  static variable_list differentiable(const Tensor& dy, const Saved& s, bool wants_x, bool wants_w,
                                      const Tensor& db) {
    Tensor dx, dw;
    if (wants_x) {
      const Tensor addend = at::matmul(dy, s.weight);
      dx = s.sequence_parallel ? reduce_scatter_region(addend, s.group, 0, s.tokens.sizes)
                               : reduce_from_region(addend, s.group);
    }
    if (wants_w)
      dw = weight_grad(dy, s.sequence_parallel ? all_gather_region(s.x, s.group, 0, s.tokens.sizes)
                                               : copy_to_region(s.x, s.group));
    return gradients(dx, dw, db);
  }
};

struct RowLinear : Function<RowLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const std::string& group,
                        bool sequence_parallel, const Split& tokens) {
    Saved::put(ctx, x, weight, bias.has_value(), group, sequence_parallel, tokens);
    const Tensor addend = at::linear(x, weight);
    Tensor y = sequence_parallel ? comm::reduce_scatter(addend, group, 0, tokens)
                                 : comm::all_reduce_fresh(addend, group);
    return bias.has_value() ? y.add_(*bias) : y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto s = Saved::get(ctx);
    const bool wants_x = ctx->needs_input_grad(0), wants_w = ctx->needs_input_grad(1);
    const bool wants_b = s.has_bias && ctx->needs_input_grad(2);
    if (at::GradMode::is_enabled()) return differentiable(grads[0], s, wants_x, wants_w, wants_b);

    std::optional<comm::Pending> db;
    Tensor dy = grads[0], db_local = wants_b ? bias_grad(dy) : Tensor();
    if (s.sequence_parallel) {
      if (wants_b) db.emplace(comm::all_reduce_async(db_local, s.group));
      if (wants_x || wants_w) dy = comm::all_gather(dy, s.group, 0, s.tokens);
    }
    const Tensor dx = wants_x ? input_grad(dy, s.weight) : Tensor();
    const Tensor dw = wants_w ? weight_grad(dy, s.x) : Tensor();
    return gradients(dx, dw, db ? db->wait() : db_local);
  }

  static variable_list differentiable(const Tensor& grad, const Saved& s, bool wants_x,
                                      bool wants_w, bool wants_b) {
    const Tensor dy = s.sequence_parallel ? all_gather_region(grad, s.group, 0, s.tokens.sizes)
                                          : copy_to_region(grad, s.group);
    Tensor db = wants_b ? bias_grad(grad) : Tensor();
    if (wants_b && s.sequence_parallel) db = reduce_from_region(db, s.group);
    return gradients(wants_x ? at::matmul(dy, s.weight) : Tensor(),
                     wants_w ? weight_grad(dy, s.x) : Tensor(), db);
  }
};

void check(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  check_floating(x, "x");
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: shape ", weight.sym_sizes(), " must have 2 dims");
  TORCH_CHECK_VALUE(x.dim() > 0 && x.sym_size(-1) == weight.sym_size(1), "x: shape ", x.sym_sizes(),
                    " must end in the ", weight.sym_size(1),
                    " input features of weight on this rank");
  check_same_dtype(x, "x", weight, "weight");
  check_same_device(x, "x", weight, "weight");
  if (!bias.has_value()) return;
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), "bias: shape ",
                    bias->sym_sizes(), " must be the ", weight.sym_size(0),
                    " output features of weight on this rank");
  check_same_dtype(*bias, "bias", weight, "weight");
}

Tensor column_parallel_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                              const std::string& group, bool sequence_parallel, Sizes sizes) {
  check(x, weight, bias);
  const int64_t p = comm::size(group);
  if (p == 1) return at::linear(x, weight, bias);
  Split tokens;
  if (sequence_parallel) {
    TORCH_CHECK_VALUE(x.dim() > 1, "x: shape ", x.sym_sizes(),
                      " must have a dim of tokens under sequence_parallel");
    tokens = split_local(x.sym_size(0), comm::rank(group), p, sizes);
  }
  return ColumnLinear::apply(x, weight, bias, group, sequence_parallel, tokens);
}

Tensor row_parallel_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                           const std::string& group, bool sequence_parallel, Sizes sizes) {
  check(x, weight, bias);
  const int64_t p = comm::size(group);
  if (p == 1) return at::linear(x, weight, bias);
  Split tokens;
  if (sequence_parallel) {
    TORCH_CHECK_VALUE(x.dim() > 1, "x: shape ", x.sym_sizes(),
                      " must have a dim of tokens under sequence_parallel");
    tokens = split_full(x.sym_size(0), p, sizes);
  }
  return RowLinear::apply(x, weight, bias, group, sequence_parallel, tokens);
}

// Autocast as for torch's linear: everything in the low precision, fp32 weights cast once per
// region
template <c10::DispatchKey key, c10::DeviceType device, auto linear>
Tensor autocast(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                const std::string& group, bool sequence_parallel, Sizes sizes) {
  c10::impl::ExcludeDispatchKeyGuard guard(key);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(dtype, t, device); };
  return linear(cast(x), cast(weight), bias.has_value() ? OptionalTensor(cast(*bias)) : bias, group,
                sequence_parallel, sizes);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  m.impl("column_parallel_linear", column_parallel_linear);
  m.impl("row_parallel_linear", row_parallel_linear);
}
TORCH_LIBRARY_IMPL(tp_ext, AutocastCPU, m) {
  m.impl("column_parallel_linear",
         autocast<c10::DispatchKey::AutocastCPU, c10::kCPU, column_parallel_linear>);
  m.impl("row_parallel_linear",
         autocast<c10::DispatchKey::AutocastCPU, c10::kCPU, row_parallel_linear>);
}
TORCH_LIBRARY_IMPL(tp_ext, AutocastCUDA, m) {
  m.impl("column_parallel_linear",
         autocast<c10::DispatchKey::AutocastCUDA, c10::kCUDA, column_parallel_linear>);
  m.impl("row_parallel_linear",
         autocast<c10::DispatchKey::AutocastCUDA, c10::kCUDA, row_parallel_linear>);
}

}  // namespace tp_ext
