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
#include <ATen/ops/add.h>

#include "autograd/autocast.h"
#include "autograd/float8.h"
#include "autograd/function.h"
#include "autograd/linear_overlap.h"
#include "operators.h"

namespace tp_ext {
namespace {

constexpr const char* kFloat8Linear = "a linear with float8";

struct Float8Call {
  std::string group;
  bool sequence_parallel;
  Split tokens;  // under SP: tokens per rank
  bool by_row;
  at::ScalarType forward, gradient;
  bool communicate;
  bool sum_input_grad = true;  // of a column linear
  bool sum_bias_grad = true;   // of a row linear
};

std::vector<SymInt> with_features(const Tensor& x, const SymInt& n) {
  auto shape = x.sym_sizes().vec();
  shape.back() = n;
  return shape;
}

// Not a view of y, which the caller has just made, to autograd
Tensor in_shape(const Tensor& y, at::SymIntArrayRef shape) {
  return at::_unsafe_view_symint(y, shape);
}

// The ranks' tokens of x [tokens, .., n] as rows
Split rows_of_ranks(const Tensor& x, Split tokens) {
  for (int64_t d = 1; d < x.dim() - 1; ++d)
    for (auto& n : tokens.sizes) n = n * x.sym_size(d);
  return tokens;
}

// Rows of all ranks, in 8 bits; a scale per row: gathered, too
Scaled gather(const Scaled& x, const std::string& group, const Split& rows, bool scale_per_row) {
  const Tensor bytes = comm::all_gather(x.values.contiguous().view(at::kByte), group, 0, rows);
  return {bytes.view(x.values.scalar_type()),
          scale_per_row ? comm::all_gather(x.inverse, group, 0, rows) : x.inverse};
}

struct SavedFloat8 : Float8Call {
  Scaled x, weight;  // by row, and where gathers move x's dtype: x, weight themselves, no inverse
  Split rows;
  bool has_bias;
  at::ScalarType weight_dtype, bias_dtype;

  static void put(AutogradContext* ctx, const Scaled& x, const Scaled& weight, const Split& rows,
                  at::ScalarType weight_dtype, const OptionalTensor& bias, const Float8Call& call) {
    ctx->save_for_backward({x.values, x.inverse, weight.values, weight.inverse});
    auto& data = ctx->saved_data;
    data["group"] = call.group;
    data["by_row"] = call.by_row;
    data["formats"] = std::vector<int64_t>{static_cast<int64_t>(call.forward),
                                           static_cast<int64_t>(call.gradient),
                                           static_cast<int64_t>(weight_dtype)};
    data["communicate"] = call.communicate;
    data["sum_input_grad"] = call.sum_input_grad;
    data["sum_bias_grad"] = call.sum_bias_grad;
    if (bias.has_value()) data["bias"] = static_cast<int64_t>(bias->scalar_type());
    if (call.sequence_parallel) {
      data["tokens"] = c10::SymIntArrayRef(call.tokens.sizes);
      data["rows"] = c10::SymIntArrayRef(rows.sizes);
    }
  }
  static SavedFloat8 get(AutogradContext* ctx) {
    auto tensors = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const bool sp = data.count("tokens") > 0, has_bias = data.count("bias") > 0;
    const auto formats = data["formats"].toIntVector();
    const auto dtype = [](int64_t number) { return static_cast<at::ScalarType>(number); };
    return {{data["group"].toStringRef(), sp, sp ? Split{data["tokens"].toSymIntVector()} : Split(),
             data["by_row"].toBool(), dtype(formats[0]), dtype(formats[1]),
             data["communicate"].toBool(), data["sum_input_grad"].toBool(),
             data["sum_bias_grad"].toBool()},
            // x itself was saved as it came: a view would hide from autograd that x has changed
            {tensors[0].defined() && !tensors[1].defined() ? as_rows(tensors[0]) : tensors[0],
             tensors[1]},
            {tensors[2], tensors[3]},
            sp ? Split{data["rows"].toSymIntVector()} : Split(),
            has_bias,
            dtype(formats[2]),
            has_bias ? dtype(data["bias"].toInt()) : at::kFloat};
  }
};

Tensor with_bias(const Tensor& y, const OptionalTensor& bias) {
  if (!bias.has_value()) return y;
  const Tensor added = bias->to(y.scalar_type());
  return comm::traced(y) ? at::add(y, added) : y.add_(added);
}

struct Float8ColumnLinear : Function<Float8ColumnLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const Float8Call& call) {
    const Unrecorded guard(x);
    const bool sp = call.sequence_parallel, by_row = call.by_row;
    const Split rows = sp ? rows_of_ranks(x, call.tokens) : Split();
    const bool late = sp && !call.communicate;  // quantises what was gathered
    const Tensor own = as_rows(x);
    const Tensor operand = late ? comm::all_gather(own, call.group, 0, rows) : own;
    Tensor x_amax = amax_of(operand, by_row ? std::optional<int64_t>(1) : std::nullopt);
    Tensor w_amax = amax_of(weight, by_row ? std::optional<int64_t>(1) : std::nullopt);
    if (!by_row && sp && !late) {
      const auto both = max_over(call.group, {x_amax, w_amax});
      x_amax = both[0], w_amax = both[1];
    } else if (!by_row) {
      w_amax = max_over(call.group, {w_amax})[0];
    }
    const Scaled x8 = quantized(operand, x_amax, call.forward);
    const Scaled w8 = quantized(weight, w_amax, call.forward);
    const Scaled full = sp && !late ? gather(x8, call.group, rows, by_row) : x8;
    const Tensor none;
    SavedFloat8::put(ctx,
                     !weight.requires_grad() ? Scaled{}
                     : by_row || late        ? Scaled{x, none}
                                             : x8,
                     !x.requires_grad() ? Scaled{}
                     : by_row           ? Scaled{weight, none}
                                        : w8,
                     rows, weight.scalar_type(), bias, call);
    const Tensor y = scaled_product(full, w8.t(), by_row, x.scalar_type());
    auto shape = with_features(x, weight.sym_size(0));
    if (sp) shape[0] = call.tokens.total();
    return with_bias(in_shape(y, shape), bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward(kFloat8Linear, grads);
    const auto s = SavedFloat8::get(ctx);
    const bool wants_x = ctx->needs_input_grad(0), wants_w = ctx->needs_input_grad(1);
    const bool wants_b = s.has_bias && ctx->needs_input_grad(2);
    const Unrecorded guard(grads[0]);
    const Tensor dy = as_rows(grads[0]);
    const bool late = s.sequence_parallel && !s.communicate;
    const bool gathers = s.sequence_parallel && wants_w;
    const Tensor x_full =
        gathers && late ? comm::all_gather(s.x.values, s.group, 0, s.rows) : s.x.values;
    // The numbers of which ranks hold parts: a row of dy and a column of w have features of all
    // ranks, a column of x tokens of all ranks under SP. A column of dy is whole on its rank.
    std::vector<Tensor> largest;
    if (s.by_row) {
      if (wants_x) largest = {amax_of(dy, 1), amax_of(s.weight.values, 0)};
      if (gathers && !late) largest.push_back(amax_of(s.x.values, 0));
    } else if (wants_x || wants_w) {
      largest = {amax_of(dy)};
    }
    largest = max_over(s.group, largest);
    std::optional<comm::Pending> dx;
    // Of a tensor one scale serves both products; by row each sums over another dim of dy
    Scaled dy8;
    if (!s.by_row && !largest.empty()) dy8 = quantized(dy, largest[0], s.gradient);
    if (wants_x) {
      const Scaled left = s.by_row ? quantized(dy, largest[0], s.gradient) : dy8;
      const Scaled w8 = s.by_row ? quantized(s.weight.values, largest[1], s.forward) : s.weight;
      const Tensor partial = scaled_product(left, w8, s.by_row, dy.scalar_type());
      const Tensor shaped = partial.reshape_symint(with_features(grads[0], partial.sym_size(1)));
      // Runs during the product of dw [Note: overlap on every backend]
      dx.emplace(s.sequence_parallel ? comm::reduce_scatter_async(shaped, s.group, 0, s.tokens)
                 : s.sum_input_grad  ? comm::all_reduce_async(shaped, s.group)
                                     : comm::Pending(shaped, nullptr));
    }
    const Tensor db = wants_b ? dy.sum(0).to(s.bias_dtype) : Tensor();
    Tensor dw;
    if (wants_w) {
      Scaled x8 = s.x;
      // Gathered in its dtype x has no scale yet; the whole x is here, so no rank has to be asked
      if (late) {
        const auto dim = s.by_row ? std::optional<int64_t>(0) : std::nullopt;
        x8 = quantized(x_full, amax_of(x_full, dim), s.forward);
      } else if (s.by_row) {
        x8 = quantized(s.x.values, gathers ? largest.back() : amax_of(s.x.values, 0), s.forward);
      }
      if (gathers && !late) x8 = gather(x8, s.group, s.rows, false);
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
    const bool by_row = call.by_row;
    const auto dim = by_row ? std::optional<int64_t>(1) : std::nullopt;
    const Tensor own = as_rows(x);
    const auto largest = max_over(call.group, {amax_of(own, dim), amax_of(weight, dim)});
    const Scaled x8 = quantized(own, largest[0], call.forward);
    const Scaled w8 = quantized(weight, largest[1], call.forward);
    const Tensor none;
    SavedFloat8::put(ctx,
                     !weight.requires_grad() ? Scaled{}
                     : by_row                ? Scaled{x, none}
                                             : x8,
                     !x.requires_grad() ? Scaled{}
                     : by_row           ? Scaled{weight, none}
                                        : w8,
                     call.sequence_parallel ? rows_of_ranks(x, call.tokens) : Split(),
                     weight.scalar_type(), bias, call);
    const Tensor partial = in_shape(scaled_product(x8, w8.t(), by_row, x.scalar_type()),
                                    with_features(x, weight.sym_size(0)));
    const Tensor y = call.sequence_parallel
                         ? comm::reduce_scatter_fresh(partial, call.group, 0, call.tokens)
                         : comm::all_reduce_fresh(partial, call.group);
    return with_bias(y, bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward(kFloat8Linear, grads);
    const auto s = SavedFloat8::get(ctx);
    const bool wants_x = ctx->needs_input_grad(0), wants_w = ctx->needs_input_grad(1);
    const bool wants_b = s.has_bias && ctx->needs_input_grad(2);
    const Unrecorded guard(grads[0]);
    const Tensor own = as_rows(grads[0]);
    const bool sp = s.sequence_parallel, late = sp && !s.communicate;
    const bool wants = wants_x || wants_w;
    const Tensor dy = late && wants ? comm::all_gather(own, s.group, 0, s.rows) : own;
    // dy with a scale of all of it, or along dim, of all ranks
    const auto of_all_ranks = [&](std::optional<int64_t> dim) {
      Tensor largest = amax_of(dy, dim);
      // A row of dy is on one rank
      if (sp && !late && dim != 1) largest = max_over(s.group, {largest})[0];
      const Scaled dy8 = quantized(dy, largest, s.gradient);
      return sp && !late ? gather(dy8, s.group, s.rows, dim == 1) : dy8;
    };
    Scaled whole;
    if (wants && !s.by_row) whole = of_all_ranks(std::nullopt);
    Tensor dx, dw, db;
    std::optional<comm::Pending> db_sum;
    if (wants_b) {
      db = own.sum(0).to(s.bias_dtype);
      if (sp && s.sum_bias_grad) db_sum.emplace(comm::all_reduce_async(db, s.group));
    }
    if (wants_x) {
      const Scaled w8 =
          s.by_row ? quantized(s.weight.values, amax_of(s.weight.values, 0), s.forward) : s.weight;
      dx = scaled_product(s.by_row ? of_all_ranks(1) : whole, w8, s.by_row, own.scalar_type());
      auto shape = with_features(grads[0], dx.sym_size(1));
      if (sp) shape[0] = s.tokens.total();
      dx = dx.reshape_symint(shape);
    }
    if (wants_w) {
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

SymInt tokens_in(const Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() > 1, "x: shape ", x.sym_sizes(),
                    " must have a dim of tokens under sequence_parallel");
  return x.sym_size(0);
}

}  // namespace

Tensor float8_column_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                            const std::string& group, bool sequence_parallel, Sizes sizes,
                            bool by_row, at::ScalarType forward, at::ScalarType gradient,
                            bool communicate, bool sum_input_grad) {
  refuse_forward_mode(kFloat8Linear, x, weight, bias);
  const int64_t p = comm::size(group);
  Float8Call call{
      group,         sequence_parallel && p > 1, Split(), by_row, forward, gradient, communicate,
      sum_input_grad};
  check_float8(x, weight, call.forward, call.gradient);
  check_float8_linear(x, weight, bias);
  if (call.sequence_parallel) call.tokens = split_local(tokens_in(x), comm::rank(group), p, sizes);
  return Float8ColumnLinear::apply(x, weight, bias, call);
}

Tensor float8_row_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                         const std::string& group, bool sequence_parallel, Sizes sizes, bool by_row,
                         at::ScalarType forward, at::ScalarType gradient, bool communicate,
                         bool sum_bias_grad) {
  refuse_forward_mode(kFloat8Linear, x, weight, bias);
  const int64_t p = comm::size(group);
  Float8Call call{group,        sequence_parallel && p > 1,
                  Split(),      by_row,
                  forward,      gradient,
                  communicate,  true,
                  sum_bias_grad};
  check_float8(x, weight, call.forward, call.gradient);
  check_float8_linear(x, weight, bias);
  if (call.sequence_parallel) call.tokens = split_full(tokens_in(x), p, sizes);
  return Float8RowLinear::apply(x, weight, bias, call);
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<float8_column_linear>(m, "float8_column_linear");
  impl_composite<float8_row_linear>(m, "float8_row_linear");
}
TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  autocast_to_low_precision<float8_column_linear, 0>(m, "float8_column_linear");
  autocast_to_low_precision<float8_row_linear, 0>(m, "float8_row_linear");
}

}  // namespace tp_ext
