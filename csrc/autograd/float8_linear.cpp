// The tensor-parallel linears whose products are of 8-bit floating point. As linear.cpp, but each
// operand of
//
//   y = x w^T    dx = dy w    dw = dy^T x
//
// is quantised from its own values first: x and w to the forward format, dy to that of gradients.
// Its scale is that of the full tensor [Note: scales of the full tensor]: of all of it, or (by row)
// of what a product sums over, which is a row of x and w for y, a row of dy and a column of w for
// dx, a column of dy and of x for dw. Where ranks share what a scale is of, one max-reduce of all
// such numbers of a pass precedes the products:
//
//               column                                   row
//   tensor, y   amax of w, [of x]                        amax of x and w
//   tensor, d   amax of dy                               [amax of dy]
//   by row, y                                            of each row of x and of w
//   by row, d   of each row of dy, each column of w,     [of each column of dy]
//               [of each column of x]
//
// [..]: under sequence parallelism, whose gathers move 8 bits with `communicate`: by row x and dy
// are then gathered in the form that a product needs. Sums over ranks are those of linear.cpp, in
// the dtype of x. Saved: per tensor x and w in 8 bits, else in their own.

#include <ATen/ops/_unsafe_view.h>

#include "autograd/autocast.h"
#include "autograd/exchange.h"
#include "autograd/float8.h"
#include "autograd/linear_checks.h"
#include "autograd/linear_overlap.h"

namespace tp_ext {
namespace {

constexpr const char* kFloat8Linear = "a linear with float8";

struct Float8Call {
  Exchange tokens;  // cut under SP
  Split rows{};     // the same tokens, as rows
  bool by_row = false;
  at::ScalarType forward = at::kFloat, gradient = at::kFloat;
  bool communicate = false;
  bool sum_input_grad = true;  // of a column linear
  bool sum_bias_grad = true;   // of a row linear
  at::ScalarType weight_dtype = at::kFloat, bias_dtype = at::kFloat;
  bool has_bias = false;

  auto fields() {
    return std::tuple_cat(tokens.fields(),
                          std::tie(rows, by_row, forward, gradient, communicate, sum_input_grad,
                                   sum_bias_grad, weight_dtype, bias_dtype, has_bias));
  }
  // Whether gathers move the dtype of x, so that what was gathered is quantised
  bool late() const { return tokens.cut() && !communicate; }
  Tensor gathered(const Tensor& x) const { return comm::all_gather(x, tokens.group, 0, rows); }
  // Rows of all ranks, in 8 bits; a scale per row: gathered, too
  Scaled gathered(const Scaled& x, bool scale_per_row) const {
    const Tensor bytes = gathered(x.values.contiguous().view(at::kByte));
    return {bytes.view(x.values.scalar_type()), scale_per_row ? gathered(x.inverse) : x.inverse};
  }
};

// Not a view of y, which the caller has just made, to autograd
Tensor in_shape(const Tensor& y, at::SymIntArrayRef shape) {
  return at::_unsafe_view_symint(y, shape);
}

// By row, and where gathers move the dtype of x: x and weight themselves, without an inverse
struct SavedFloat8 : Float8Call {
  Scaled x, weight;
  bool wants_x, wants_w, wants_b;

  static void put(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Scaled& x8,
                  const Scaled& w8, bool keeps_x, const Float8Call& call) {
    const auto kept = [&](bool wanted, bool itself, const Tensor& t, const Scaled& scaled) {
      return !wanted ? Scaled{} : itself ? Scaled{t, Tensor()} : scaled;
    };
    const Scaled of_x = kept(weight.requires_grad(), keeps_x || call.by_row, x, x8);
    const Scaled of_w = kept(x.requires_grad(), call.by_row, weight, w8);
    ctx->save_for_backward({of_x.values, of_x.inverse, of_w.values, of_w.inverse});
    put_call(ctx, call);
  }
  explicit SavedFloat8(AutogradContext* ctx)
      : Float8Call(get_call<Float8Call>(ctx)),
        wants_x(ctx->needs_input_grad(0)),
        wants_w(ctx->needs_input_grad(1)),
        wants_b(has_bias && ctx->needs_input_grad(2)) {
    const auto tensors = ctx->get_saved_variables();
    // x itself was saved as it came: a view would hide from autograd that x has changed
    x = {tensors[0].defined() && !tensors[1].defined() ? as_rows(tensors[0]) : tensors[0],
         tensors[1]};
    weight = {tensors[2], tensors[3]};
  }
};

Tensor plus_float8_bias(const Tensor& y, const OptionalTensor& bias) {
  return plus_bias(y, bias.has_value() ? OptionalTensor(bias->to(y.scalar_type())) : bias);
}

struct Float8ColumnLinear : Function<Float8ColumnLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const Float8Call& call) {
    const Unrecorded guard(x);
    const bool sp = call.tokens.cut(), by_row = call.by_row, late = call.late();
    const auto dim = by_row ? std::optional<int64_t>(1) : std::nullopt;
    const Tensor operand = late ? call.gathered(as_rows(x)) : as_rows(x);
    Tensor x_amax = amax_of(operand, dim), w_amax = amax_of(weight, dim);
    if (!by_row && sp && !late) {
      const auto both = max_over(call.tokens.group, {x_amax, w_amax});
      x_amax = both[0], w_amax = both[1];
    } else if (!by_row) {
      w_amax = max_over(call.tokens.group, {w_amax})[0];
    }
    const Scaled x8 = quantized(operand, x_amax, call.forward);
    const Scaled w8 = quantized(weight, w_amax, call.forward);
    const Scaled full = sp && !late ? call.gathered(x8, by_row) : x8;
    SavedFloat8::put(ctx, x, weight, x8, w8, late, call);
    const Tensor y = scaled_product(full, w8.t(), by_row, x.scalar_type());
    auto shape = with_features(x, weight.sym_size(0));
    if (sp) shape[0] = call.tokens.split.total();
    return plus_float8_bias(in_shape(y, shape), bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward(kFloat8Linear, grads);
    const SavedFloat8 s(ctx);
    const Unrecorded guard(grads[0]);
    const Tensor dy = as_rows(grads[0]);
    const bool late = s.late(), gathers = s.tokens.cut() && s.wants_w;
    const Tensor x_full = gathers && late ? s.gathered(s.x.values) : s.x.values;
    // The numbers of which ranks hold parts: a row of dy and a column of w have features of all
    // ranks, a column of x tokens of all ranks under SP. A column of dy is whole on its rank.
    std::vector<Tensor> largest;
    if (s.by_row) {
      if (s.wants_x) largest = {amax_of(dy, 1), amax_of(s.weight.values, 0)};
      if (gathers && !late) largest.push_back(amax_of(s.x.values, 0));
    } else if (s.wants_x || s.wants_w) {
      largest = {amax_of(dy)};
    }
    largest = max_over(s.tokens.group, largest);
    std::optional<comm::Pending> dx;
    // Of a tensor one scale serves both products; by row each sums over another dim of dy
    Scaled dy8;
    if (!s.by_row && !largest.empty()) dy8 = quantized(dy, largest[0], s.gradient);
    if (s.wants_x) {
      const Scaled left = s.by_row ? quantized(dy, largest[0], s.gradient) : dy8;
      const Scaled w8 = s.by_row ? quantized(s.weight.values, largest[1], s.forward) : s.weight;
      const Tensor partial = scaled_product(left, w8, s.by_row, dy.scalar_type());
      const Tensor shaped = partial.reshape_symint(with_features(grads[0], partial.sym_size(1)));
      // Runs during the product of dw [Note: overlap on every backend]
      dx.emplace(s.tokens.cut() || s.sum_input_grad ? s.tokens.sum_async(shaped)
                                                    : comm::Pending(shaped, nullptr));
    }
    const Tensor db = s.wants_b ? dy.sum(0).to(s.bias_dtype) : Tensor();
    Tensor dw;
    if (s.wants_w) {
      Scaled x8 = s.x;
      // Gathered in its dtype x has no scale yet; the whole x is here, so no rank has to be asked
      if (late) {
        const auto dim = s.by_row ? std::optional<int64_t>(0) : std::nullopt;
        x8 = quantized(x_full, amax_of(x_full, dim), s.forward);
      } else if (s.by_row) {
        x8 = quantized(s.x.values, gathers ? largest.back() : amax_of(s.x.values, 0), s.forward);
      }
      if (gathers && !late) x8 = s.gathered(x8, false);
      const Scaled left = s.by_row ? quantized(dy, amax_of(dy, 0), s.gradient) : dy8;
      dw = scaled_product(left.t(), x8, s.by_row, s.weight_dtype);
    }
    return gradients({dx ? dx->wait() : Tensor(), dw, db});
  }
};

struct Float8RowLinear : Function<Float8RowLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const Float8Call& call) {
    const Unrecorded guard(x);
    const auto dim = call.by_row ? std::optional<int64_t>(1) : std::nullopt;
    const Tensor own = as_rows(x);
    const auto largest = max_over(call.tokens.group, {amax_of(own, dim), amax_of(weight, dim)});
    const Scaled x8 = quantized(own, largest[0], call.forward);
    const Scaled w8 = quantized(weight, largest[1], call.forward);
    SavedFloat8::put(ctx, x, weight, x8, w8, false, call);
    const Tensor partial = in_shape(scaled_product(x8, w8.t(), call.by_row, x.scalar_type()),
                                    with_features(x, weight.sym_size(0)));
    return plus_float8_bias(call.tokens.sum(partial), bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward(kFloat8Linear, grads);
    const SavedFloat8 s(ctx);
    const Unrecorded guard(grads[0]);
    const Tensor own = as_rows(grads[0]);
    const bool sp = s.tokens.cut(), late = s.late(), wants = s.wants_x || s.wants_w;
    const Tensor dy = late && wants ? s.gathered(own) : own;
    // dy with a scale of all of it, or along dim, of all ranks
    const auto of_all_ranks = [&](std::optional<int64_t> dim) {
      Tensor largest = amax_of(dy, dim);
      // A row of dy is on one rank
      if (sp && !late && dim != 1) largest = max_over(s.tokens.group, {largest})[0];
      const Scaled dy8 = quantized(dy, largest, s.gradient);
      return sp && !late ? s.gathered(dy8, dim == 1) : dy8;
    };
    Scaled whole;
    if (wants && !s.by_row) whole = of_all_ranks(std::nullopt);
    Tensor dx, dw, db;
    std::optional<comm::Pending> db_sum;
    if (s.wants_b) {
      db = own.sum(0).to(s.bias_dtype);
      if (sp && s.sum_bias_grad) db_sum.emplace(comm::all_reduce_async(db, s.tokens.group));
    }
    if (s.wants_x) {
      const Scaled w8 =
          s.by_row ? quantized(s.weight.values, amax_of(s.weight.values, 0), s.forward) : s.weight;
      dx = scaled_product(s.by_row ? of_all_ranks(1) : whole, w8, s.by_row, own.scalar_type());
      auto shape = with_features(grads[0], dx.sym_size(1));
      if (sp) shape[0] = s.tokens.split.total();
      dx = dx.reshape_symint(shape);
    }
    if (s.wants_w) {
      const Scaled x8 = s.by_row ? quantized(s.x.values, amax_of(s.x.values, 0), s.forward) : s.x;
      dw = scaled_product((s.by_row ? of_all_ranks(0) : whole).t(), x8, s.by_row, s.weight_dtype);
    }
    return gradients({dx, dw, db_sum ? db_sum->wait() : db});
  }
};

void check_float8_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: shape ", weight.sym_sizes(), " must have 2 dims");
  TORCH_CHECK_VALUE(x.dim() > 0 && x.sym_size(-1) == weight.sym_size(1), "x: shape ", x.sym_sizes(),
                    " must end in the ", weight.sym_size(1),
                    " input features of weight on this rank");
  if (!bias.has_value()) return;
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), "bias: shape ",
                    bias->sym_sizes(), " must be the ", weight.sym_size(0),
                    " output features of weight on this rank");
}

// `tokens`: how those of x are cut over p > 1 ranks, under sequence parallelism
template <typename F>
Float8Call checked_call(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                        const std::string& group, bool sequence_parallel, bool by_row,
                        at::ScalarType forward, at::ScalarType gradient, bool communicate,
                        const F& tokens) {
  refuse_forward_mode(kFloat8Linear, x, weight, bias);
  const int64_t p = comm::size(group);
  check_float8(x, weight, forward, gradient);
  check_float8_linear(x, weight, bias);
  Float8Call call{{group}, Split(), by_row, forward, gradient, communicate};
  call.weight_dtype = weight.scalar_type();
  call.has_bias = bias.has_value();
  if (call.has_bias) call.bias_dtype = bias->scalar_type();
  if (sequence_parallel && p > 1) {
    call.tokens.split = tokens(tokens_of(x), p);
    call.rows = rows_of_ranks(x, call.tokens.split);
  }
  return call;
}

}  // namespace

Tensor float8_column_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                            const std::string& group, bool sequence_parallel, Sizes sizes,
                            bool by_row, at::ScalarType forward, at::ScalarType gradient,
                            bool communicate, bool sum_input_grad) {
  auto call = checked_call(x, weight, bias, group, sequence_parallel, by_row, forward, gradient,
                           communicate, [&](const SymInt& tokens, int64_t p) {
                             return split_local(tokens, comm::rank(group), p, sizes);
                           });
  call.sum_input_grad = sum_input_grad;
  return Float8ColumnLinear::apply(x, weight, bias, call);
}

Tensor float8_row_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                         const std::string& group, bool sequence_parallel, Sizes sizes, bool by_row,
                         at::ScalarType forward, at::ScalarType gradient, bool communicate,
                         bool sum_bias_grad) {
  auto call = checked_call(
      x, weight, bias, group, sequence_parallel, by_row, forward, gradient, communicate,
      [&](const SymInt& tokens, int64_t p) { return split_full(tokens, p, sizes); });
  call.sum_bias_grad = sum_bias_grad;
  return Float8RowLinear::apply(x, weight, bias, call);
}

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  autocast_to_low_precision<float8_column_linear, 0>(m, "float8_column_linear");
  autocast_to_low_precision<float8_row_linear, 0>(m, "float8_row_linear");
}

}  // namespace tp_ext
