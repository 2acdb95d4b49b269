// Attention of one tile: torch's fused kernels, through their operators that return lse, or the
// formula step by step for what these do not compute.

#include "autograd/attention_tile.h"

#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>

#include <limits>

#include "operators.h"
#include "products.h"
#include "tiled_attention.h"

namespace tp_ext {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kMostKeysInFp32 = 512;

enum class Kernel { tiles_cpu, flash_cpu, flash, efficient, formula };

Operands to(const Operands& operands, at::ScalarType dtype) {
  return {operands.q.to(dtype), operands.k.to(dtype), operands.v.to(dtype)};
}

// Any choice on the CPU has the same lse; elsewhere forward and backward choose alike, by device,
// dtype and head_dim
Kernel kernel_of(const Operands& operands, const TileOptions& options) {
  const auto& [q, k, v] = operands;
  if (options.is_explicit()) return Kernel::formula;
  const auto dtype = q.scalar_type();
  const auto head_dim = q.sym_size(3);
  if (q.device().is_cpu()) return products::attend(q, k, v) ? Kernel::tiles_cpu : Kernel::flash_cpu;
  if (!q.device().is_cuda() || dtype == at::kDouble) return Kernel::formula;
  if (dtype != at::kFloat && head_dim % 8 == 0 && head_dim <= 256) return Kernel::flash;
  return head_dim % 8 == 0 ? Kernel::efficient : Kernel::formula;
}

// The query heads of a KV head as rows of one head, and the inverse
Tensor folded(const Tensor& q, const SymInt& kv_heads) {
  if (q.sym_size(1) == kv_heads) return q;
  return q.reshape_symint({q.sym_size(0), kv_heads, -1, q.sym_size(3)});
}
Tensor unfolded(const Tensor& rows, const SymInt& heads, const SymInt& queries) {
  if (rows.sym_size(1) == heads) return rows;
  if (rows.dim() == 3) return rows.reshape_symint({rows.sym_size(0), heads, queries});
  return rows.reshape_symint({rows.sym_size(0), heads, queries, rows.sym_size(3)});
}

// A copy of k or v for each query head, and the sum over the copies
Tensor expanded(const Tensor& k, const SymInt& heads) {
  if (k.sym_size(1) == heads) return k;
  const auto share = heads / k.sym_size(1);
  return k.unsqueeze(2)
      .expand_symint({-1, -1, share, -1, -1})
      .reshape_symint({k.sym_size(0), heads, k.sym_size(2), k.sym_size(3)});
}
Tensor summed(const Tensor& dk, const SymInt& kv_heads) {
  if (dk.sym_size(1) == kv_heads) return dk;
  return dk.reshape_symint({dk.sym_size(0), kv_heads, -1, dk.sym_size(2), dk.sym_size(3)}).sum(2);
}

Attended fused_forward(Kernel kernel, const Tensor& q, const Tensor& k, const Tensor& v,
                       bool causal, double scale) {
  if (kernel == Kernel::flash_cpu) {
    auto [out, lse] =
        at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, std::nullopt, scale);
    return {out, lse};
  }
  if (kernel == Kernel::flash) {
    auto all = at::_scaled_dot_product_flash_attention(q, k, v, 0.0, causal, false, scale);
    return {std::get<0>(all), std::get<1>(all)};
  }
  auto all =
      at::_scaled_dot_product_efficient_attention(q, k, v, std::nullopt, true, 0.0, causal, scale);
  // Its lse is padded to a multiple of 32 rows
  return {std::get<0>(all), std::get<1>(all).narrow_symint(2, 0, q.sym_size(2))};
}

Operands fused_backward(Kernel kernel, const Tensor& dout, const Operands& operands,
                        const Attended& result, bool causal, double scale) {
  const auto& [q, k, v] = operands;
  const auto first_three = [](const auto& all) {
    return Operands{std::get<0>(all), std::get<1>(all), std::get<2>(all)};
  };
  if (kernel == Kernel::flash_cpu)
    return first_three(at::_scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, result.out, result.lse, 0.0, causal, std::nullopt, scale));
  // State of the dropout that is not used
  const auto none = at::empty({2}, q.options().dtype(at::kLong));
  if (kernel == Kernel::flash)
    return first_three(at::_scaled_dot_product_flash_attention_backward_symint(
        dout, q, k, v, result.out, result.lse.contiguous(), Tensor(), Tensor(), q.sym_size(2),
        k.sym_size(2), 0.0, causal, none, none, scale));
  const auto padding = (32 - q.sym_size(2) % 32) % 32;
  const auto lse = at::constant_pad_nd_symint(result.lse, {0, padding}, kInfinity);
  const auto zero = at::empty({}, q.options().dtype(at::kLong));
  return first_three(at::_scaled_dot_product_efficient_attention_backward(
      dout, q, k, v, Tensor(), result.out, lse, zero, zero, 0.0, {true, true, true, false}, causal,
      scale));
}

// Where a query must not attend to a key, or nothing if it may everywhere
Tensor hidden(const Tile& tile, const TileOptions& options, const Tensor& like) {
  const int64_t q_last = tile.q_start + tile.queries - 1, k_last = tile.k_start + tile.keys - 1;
  const bool late = options.causal && k_last > tile.q_start;
  const bool far_before = options.window && tile.k_start <= q_last - *options.window;
  const bool far_after = options.window && k_last >= tile.q_start + *options.window;
  if (!late && !far_before && !far_after) return Tensor();
  const auto integers = like.options().dtype(at::kLong);
  const auto i = at::arange(tile.q_start, q_last + 1, integers).unsqueeze(1);
  const auto j = at::arange(tile.k_start, k_last + 1, integers);
  const auto or_else = [](const Tensor& mask, const Tensor& other) {
    return mask.defined() ? mask.logical_or(other) : other;
  };
  Tensor mask;
  if (late) mask = j.gt(i);
  if (far_before) mask = or_else(mask, j.le(i.sub(*options.window)));
  if (far_after) mask = or_else(mask, j.ge(i.add(*options.window)));
  return mask;
}

// 0 or 1 / (1 - p) for each weight, by the index (batch, head, query, key) of the unsharded model
Tensor dropout_factors(const Tensor& q, const Tile& tile, const TileOptions& options,
                       int64_t length, const Tensor& seed) {
  static const auto op = TP_OP(_dropout_bwd);  // dropout is its own transpose
  const auto ones = at::ones({tile.queries, tile.keys}, q.options());
  const int64_t batch = q.sym_size(0).guard_int(__FILE__, __LINE__);
  const int64_t heads = q.sym_size(1).guard_int(__FILE__, __LINE__);
  std::vector<Tensor> masks;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t head = b * options.num_heads + options.first_head + h;
      const int64_t first = (head * length + tile.q_start) * length + tile.k_start;
      masks.push_back(op.call(ones, seed, options.dropout, tile.keys, length, first));
    }
  return at::stack(masks).view({batch, heads, tile.queries, tile.keys});
}

// softmax and what its gradient needs, q and k in the accumulating dtype
struct Scores {
  Tensor capped, hidden;  // capped: after softcap, before the mask
  Tensor masked() const {
    return hidden.defined() ? capped.masked_fill(hidden, -kInfinity) : capped;
  }
};
Scores scores_of(const Tensor& q, const Tensor& k, const Tile& tile, const TileOptions& options) {
  auto s = at::matmul(folded(q, k.sym_size(1)), k.transpose(2, 3)).mul(options.scale);
  s = s.reshape_symint({q.sym_size(0), q.sym_size(1), tile.queries, tile.keys});
  if (options.softcap) s = s.div(*options.softcap).tanh().mul(*options.softcap);
  return {s, hidden(tile, options, s)};
}

// exp(s - lse); 0 for a query without any key, whose lse is -inf
Tensor weights_of(const Scores& scores, const Tensor& lse) {
  return scores.masked().sub(lse.masked_fill(lse.eq(-kInfinity), 0).unsqueeze(-1)).exp();
}

Attended formula_forward(const Operands& operands, const Tile& tile, const TileOptions& options,
                         int64_t length, const Tensor& seed) {
  const auto& [q, k, v] = operands;
  const auto scores = scores_of(q, k, tile, options);
  const auto lse = at::logsumexp(scores.masked(), {3});
  auto weights = weights_of(scores, lse);
  if (options.dropout > 0) weights = weights.mul(dropout_factors(q, tile, options, length, seed));
  const auto out = at::matmul(folded(weights, v.sym_size(1)), v);
  return {unfolded(out, q.sym_size(1), tile.queries), lse};
}

Operands formula_backward(const Tensor& dout, const Operands& operands, const Attended& result,
                          const Tile& tile, const TileOptions& options, int64_t length,
                          const Tensor& seed) {
  const auto& [q, k, v] = operands;
  const auto kv_heads = k.sym_size(1);
  const auto scores = scores_of(q, k, tile, options);
  const auto weights = weights_of(scores, result.lse);
  const auto rows = folded(dout, kv_heads);
  auto dweights = at::matmul(rows, v.transpose(2, 3)).reshape_symint(weights.sym_sizes());
  auto dropped = weights;
  if (options.dropout > 0) {
    const auto factors = dropout_factors(q, tile, options, length, seed);
    dropped = weights.mul(factors);
    dweights = dweights.mul(factors);
  }
  const auto dv = at::matmul(folded(dropped, kv_heads).transpose(2, 3), rows);
  const auto delta = dout.mul(result.out).sum(-1, true);
  auto ds = weights.mul(dweights.sub(delta)).mul(options.scale);
  if (options.softcap) ds = ds.sub(ds.mul(scores.capped.div(*options.softcap).square()));
  const auto ds_rows = folded(ds, kv_heads);
  const auto dq = at::matmul(ds_rows, k);
  const auto dk = at::matmul(ds_rows.transpose(2, 3), folded(q, kv_heads));
  return {unfolded(dq, q.sym_size(1), tile.queries), dk, dv};
}

// Without window, softcap and dropout only tiles on the diagonal have keys behind a query
TileOptions formula_options(const Tile& tile, TileOptions options) {
  options.causal = options.causal && (tile.diagonal || options.is_explicit());
  return options;
}

}  // namespace

bool computed_in_fp32(const Tensor& q, const Tensor& k) {
  return q.is_cpu() && at::isReducedFloatingType(q.scalar_type()) &&
         k.sym_size(2) <= kMostKeysInFp32;
}

Attended tile_forward(const Operands& operands, const Tile& tile, const TileOptions& options,
                      int64_t length, const Tensor& seed) {
  const auto& [q, k, v] = operands;
  if (!options.is_explicit() && computed_in_fp32(q, k)) {
    const auto [out, lse] = tile_forward(to(operands, at::kFloat), tile, options, length, seed);
    return {out.to(q.scalar_type()), lse};
  }
  const auto kernel = kernel_of(operands, options);
  const auto heads = q.sym_size(1), kv_heads = k.sym_size(1);
  if (kernel == Kernel::formula)
    return formula_forward(to(operands, sum_dtype(q)), tile, formula_options(tile, options), length,
                           seed);
  if (kernel == Kernel::tiles_cpu) {
    const auto [out, lse] = tiled_attention_cpu(q, k, v, options.scale, tile.diagonal);
    return {out, lse};
  }
  if (kernel == Kernel::flash || heads == kv_heads)  // it knows grouped heads
    return fused_forward(kernel, q, k, v, tile.diagonal, options.scale);
  if (tile.diagonal)
    return fused_forward(kernel, q, expanded(k, heads), expanded(v, heads), true, options.scale);
  const auto part = fused_forward(kernel, folded(q, kv_heads), k, v, false, options.scale);
  return {unfolded(part.out, heads, tile.queries), unfolded(part.lse, heads, tile.queries)};
}

Operands tile_backward(const Tensor& dout, const Operands& operands, const Attended& result,
                       const Tile& tile, const TileOptions& options, int64_t length,
                       const Tensor& seed) {
  const auto& [q, k, v] = operands;
  if (!options.is_explicit() && computed_in_fp32(q, k))
    return tile_backward(dout.to(at::kFloat), to(operands, at::kFloat),
                         {result.out.to(at::kFloat), result.lse}, tile, options, length, seed);
  const auto kernel = kernel_of(operands, options);
  const auto heads = q.sym_size(1), kv_heads = k.sym_size(1);
  if (kernel == Kernel::formula) {
    const auto dtype = sum_dtype(q);
    return formula_backward(dout.to(dtype), to(operands, dtype), {result.out.to(dtype), result.lse},
                            tile, formula_options(tile, options), length, seed);
  }
  if (kernel == Kernel::tiles_cpu) {
    const auto [dq, dk, dv] = tiled_attention_backward_cpu(dout, q, k, v, result.out, result.lse,
                                                           options.scale, tile.diagonal);
    return {dq, dk, dv};
  }
  if (kernel == Kernel::flash || heads == kv_heads)
    return fused_backward(kernel, dout, operands, result, tile.diagonal, options.scale);
  if (tile.diagonal) {
    const auto grads = fused_backward(kernel, dout, {q, expanded(k, heads), expanded(v, heads)},
                                      result, true, options.scale);
    return {grads.q, summed(grads.k, kv_heads), summed(grads.v, kv_heads)};
  }
  const Attended rows{folded(result.out, kv_heads),
                      result.lse.reshape_symint({q.sym_size(0), kv_heads, -1})};
  const auto grads = fused_backward(kernel, folded(dout, kv_heads), {folded(q, kv_heads), k, v},
                                    rows, false, options.scale);
  return {unfolded(grads.q, heads, tile.queries), grads.k, grads.v};
}

Attended merged(const Attended& a, const Attended& b) {
  const auto difference = b.lse.sub(a.lse).masked_fill(b.lse.eq(-kInfinity), -kInfinity);
  const auto dtype = a.lse.scalar_type();
  return {at::lerp(a.out.to(dtype), b.out.to(dtype), difference.sigmoid().unsqueeze(-1)),
          at::logaddexp(a.lse, b.lse)};
}

}  // namespace tp_ext
