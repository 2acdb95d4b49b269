// Scaled dot-product attention whose rows depend on their own query and keys alone, for layers of
// tp_ext.tp_invariant: a query has the same bits alone, with a cache, and among all queries of a
// text, on every rank and for every number of threads [Note: rows that depend on themselves].
//
//   y_i = sum_j w_ij v_j / sum_j w_ij    w_ij = exp(cap(scale q_i k_j) + mask_ij - max_i)
//
// over the keys j that query i may see. Each head is computed on one thread: queries in tiles of up
// to kQueries, padded to whole groups of rows, keys in tiles of kTileKeys from the first key of the
// sequence on, whatever its length. A tile that a query does not see adds zeros to its sums. Saved:
// q, k, v, y, and the logarithm of the sums, from which backward computes the weights again.

#include <ATen/ops/_safe_softmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention_rows.h"
#include "autograd/autocast.h"
#include "autograd/blocks.h"
#include "autograd/call.h"
#include "check.h"
#include "dtype_dispatch.h"
#include "operators.h"

namespace tp_ext {
namespace {

constexpr int64_t kQueries = 128;
constexpr const char* kBlockAttention = "block_attention";

struct AttentionCall {
  std::vector<int64_t> kv_heads;  // of each query head; empty: its own
  bool causal = false;
  double scale = 1;
  std::optional<int64_t> window;
  double softcap = 0;

  auto fields() { return std::tie(causal, scale, window, softcap); }

  // The keys that query i of n sees, if the first key of its sequence is `first`, of m
  Keys seen(int64_t i, int64_t n, int64_t m, int64_t first) const {
    const int64_t position = m - n + i;
    const int64_t begin = window ? std::max(first, position - *window + 1) : first;
    const int64_t end = causal ? position + 1 : window ? std::min(m, position + *window) : m;
    return {begin, std::max(begin, end)};
  }
  int64_t kv_head(int64_t head) const { return kv_heads.empty() ? head : kv_heads[head]; }
};

// x[batch, head] as a matrix of the dtype of the sums
Tensor matrix_of(const Tensor& x, int64_t batch, int64_t head) {
  return x.select(0, batch).select(0, head).to(sum_dtype(x)).contiguous();
}

Tensor padded_rows(const Tensor& x, int64_t rows) {
  return x.size(0) == rows ? x : at::constant_pad_nd(x, {0, 0, 0, rows - x.size(0)});
}

// Rows [begin, end) of a matrix, with zeros where it has fewer
Tensor tile_of(const Tensor& x, int64_t begin) {
  const int64_t rows = std::min(kTileKeys, x.size(0) - begin);
  return padded_rows(x.narrow(0, begin, rows), kTileKeys);
}

// A mask [batch or 1, heads or 1, n or 1, m] that is added to scores, at a head: the row of a query,
// or null
template <typename A>
struct MaskRows {
  const Tensor& mask;
  int64_t batch, head;

  const A* row(int64_t i) const {
    if (!mask.defined()) return nullptr;
    const auto index = [&](int64_t dim, int64_t at) { return mask.size(dim) == 1 ? 0 : at; };
    return in<A>(mask) +
           ((index(0, batch) * mask.size(1) + index(1, head)) * mask.size(2) + index(2, i)) *
               mask.size(3);
  }
};

// bool: 0 and -inf; in the dtype of the sums, with all m keys
Tensor additive(const OptionalTensor& mask, const Tensor& q, int64_t m) {
  if (!mask.has_value()) return Tensor();
  Tensor added = *mask;
  if (added.scalar_type() == at::kBool) {
    const auto options = q.options().dtype(sum_dtype(q));
    const auto number = [&](double value) { return at::full({}, value, options); };
    added = at::where(added, number(0), number(-std::numeric_limits<double>::infinity()));
  }
  auto shape = added.sizes().vec();
  shape[3] = m;
  return added.to(sum_dtype(q)).expand(shape).contiguous();
}

// Matrices of one head; y [n, width], lse [n]: the logarithm of the sums. Of the gradients, dq, dk
// and dv are zeros at first
struct Head {
  Tensor q, k, v, y, lse;
};
struct HeadGrads {
  Tensor dy, dq, dk, dv;
};

// Writes y and lse. first: the first key
template <typename A>
void attend(const Head& x, const AttentionCall& call, int64_t first, const MaskRows<A>& masks) {
  const auto& [q, k, v, y, lse] = x;
  const int64_t n = q.size(0), m = k.size(0), width = v.size(1);
  const ScoreOptions<A> options{static_cast<A>(call.scale), static_cast<A>(call.softcap)};
  for (int64_t start = 0; start < n; start += kQueries) {
    const int64_t rows = std::min(kQueries, n - start), whole = whole_rows(rows);
    const Tensor queries = padded_rows(q.narrow(0, start, rows), whole);
    const Tensor scores = at::empty({whole, kTileKeys}, q.options());
    Tensor sums = at::zeros({whole, width}, q.options());
    std::vector<SoftmaxRow<A>> state(rows, {-std::numeric_limits<A>::infinity(), A(0)});
    std::vector<Keys> seen(rows);
    Keys all{m, first};
    for (int64_t i = 0; i < rows; ++i) {
      seen[i] = call.seen(start + i, n, m, first);
      if (seen[i].begin == seen[i].end) continue;
      all = {std::min(all.begin, seen[i].begin), std::max(all.end, seen[i].end)};
    }
    const int64_t skipped = (all.begin - first) / kTileKeys * kTileKeys;
    for (int64_t tile = first + skipped; tile < all.end; tile += kTileKeys) {
      Tensor target = scores;
      at::mm_out(target, queries, tile_of(k, tile).t());
      for (int64_t i = 0; i < rows; ++i) {
        const A* mask = masks.row(start + i);
        tile_weights(
            out<A>(scores) + i * kTileKeys, mask == nullptr ? mask : mask + tile,
            {std::max<int64_t>(seen[i].begin - tile, 0), std::min(seen[i].end - tile, kTileKeys)},
            options, state[i], out<A>(sums) + i * width, width);
      }
      sums.addmm_(scores, tile_of(v, tile));
    }
    for (int64_t i = 0; i < rows; ++i) {
      A* row = out<A>(sums) + i * width;
      const bool blind = state[i].sum == A(0);  // sees no key: 0, and no weight in backward
      for (int64_t j = 0; j < width; ++j) row[j] = blind ? A(0) : row[j] / state[i].sum;
      out<A>(lse)[start + i] =
          blind ? std::numeric_limits<A>::infinity() : state[i].max + std::log(state[i].sum);
    }
    y.narrow(0, start, rows).copy_(sums.narrow(0, 0, rows));
  }
}

// Writes dq, dk and dv
template <typename A>
void attend_backward(const Head& x, const HeadGrads& dx, const AttentionCall& call, int64_t first,
                     const MaskRows<A>& masks) {
  const auto& [q, k, v, y, lse] = x;
  const auto& [dy, dq, dk, dv] = dx;
  const int64_t n = q.size(0), m = k.size(0);
  const ScoreOptions<A> options{static_cast<A>(call.scale), static_cast<A>(call.softcap)};
  const Tensor dots = (dy * y).sum(1);
  for (int64_t start = 0; start < n; start += kQueries) {
    const int64_t rows = std::min(kQueries, n - start);
    const Keys one = call.seen(start, n, m, first), last = call.seen(start + rows - 1, n, m, first);
    const int64_t begin = one.begin, count = last.end - begin;
    if (count <= 0) continue;
    const auto keys = [&](const Tensor& x) { return x.narrow(0, begin, count); };
    const auto queries = [&](const Tensor& x) { return x.narrow(0, start, rows); };
    const Tensor weights = at::mm(queries(q), keys(k).t()),
                 grads = at::mm(queries(dy), keys(v).t());
    for (int64_t i = 0; i < rows; ++i) {
      const Keys seen = call.seen(start + i, n, m, first);
      const A* mask = masks.row(start + i);
      weight_grads(out<A>(weights) + i * count, out<A>(grads) + i * count,
                   mask == nullptr ? mask : mask + begin, {seen.begin - begin, seen.end - begin},
                   count, options, in<A>(lse)[start + i], in<A>(dots)[start + i]);
    }
    Tensor own = queries(dq);
    at::mm_out(own, grads, keys(k));
    keys(dk).addmm_(grads.t(), queries(q));
    keys(dv).addmm_(weights.t(), queries(dy));
  }
}

int64_t first_key(const Tensor& padding, int64_t batch) {
  return padding.defined() ? in<int64_t>(padding)[batch] : 0;
}

struct BlockAttention : Function<BlockAttention> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const OptionalTensor& mask_given, const OptionalTensor& padding_given,
                        const AttentionCall& call) {
    const Unrecorded guard(false);
    const Tensor mask = mask_given.value_or(Tensor()), padding = padding_given.value_or(Tensor());
    const int64_t batch = q.size(0), heads = q.size(1), n = q.size(2);
    const auto accumulated = q.options().dtype(sum_dtype(q));
    const Tensor lse = at::empty({batch, heads, n}, accumulated);
    // [batch, n, heads, width] in memory, as the next linear reads it
    const Tensor y = at::empty({batch, n, heads, v.size(3)}, q.options()).transpose(1, 2);
    for_each_block(q, batch * heads, [&](int64_t i) {
      const int64_t b = i / heads, h = i % heads, kv = call.kv_head(h);
      const Head head{matrix_of(q, b, h), matrix_of(k, b, kv), matrix_of(v, b, kv),
                      y.select(0, b).select(0, h), lse.select(0, b).select(0, h)};
      dispatch_accumulated(q, [&](auto zero) {
        attend<decltype(zero)>(head, call, first_key(padding, b), {mask, b, h});
      });
    });
    ctx->save_for_backward({q, k, v, y, lse, mask, padding});
    put_call(ctx, call);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward(kBlockAttention, grads);
    const Unrecorded guard(false);
    const auto saved = ctx->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &y = saved[3], &lse = saved[4];
    const Tensor &mask = saved[5], &padding = saved[6];
    const auto call = get_call<AttentionCall>(ctx);
    const int64_t heads = q.size(1);
    const Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
    for_each_block(q, q.size(0) * heads, [&](int64_t i) {
      const int64_t b = i / heads, h = i % heads;
      const auto matrix = [&](const Tensor& x) { return matrix_of(x, b, h); };
      const Head head{matrix(q), matrix(k), matrix(v), matrix(y), lse.select(0, b).select(0, h)};
      const HeadGrads own{matrix(grads[0]), at::zeros_like(head.q), at::zeros_like(head.k),
                          at::zeros_like(head.v)};
      dispatch_accumulated(q, [&](auto zero) {
        attend_backward<decltype(zero)>(head, own, call, first_key(padding, b), {mask, b, h});
      });
      const auto put = [&](const Tensor& to, const Tensor& from) {
        to.select(0, b).select(0, h).copy_(from);
      };
      put(dq, own.dq), put(dk, own.dk), put(dv, own.dv);
    });
    return gradients({dq, dk, dv});
  }

 private:
  template <typename F>
  static void dispatch_accumulated(const Tensor& x, const F& f) {
    sum_dtype(x) == at::kDouble ? f(double{}) : f(float{});
  }
};

// The same in torch's operators, for devices without row-wise products and for traced calls
Tensor formula(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
               const Tensor& padding, const AttentionCall& call) {
  const auto own = [&](const Tensor& x) {
    if (call.kv_heads.empty()) return x;
    std::vector<Tensor> heads;
    for (const int64_t head : call.kv_heads) heads.push_back(x.narrow(1, head, 1));
    return at::cat(heads, 1);
  };
  const int64_t n = q.size(2), m = k.size(2);
  const auto places = q.options().dtype(at::kLong);
  const Tensor j = at::arange(m, places), i = at::arange(m - n, m, places).unsqueeze(1);
  Tensor seen = call.causal ? j <= i : (j >= 0).expand({n, m});
  if (call.window) seen = seen & (j > i - *call.window) & (j < i + *call.window);
  if (padding.defined()) seen = seen & (j >= padding.view({-1, 1, 1, 1}));
  Tensor scores = at::matmul(q, own(k).transpose(-1, -2));
  scores = call.softcap == 0 ? scores * call.scale
                             : at::tanh(scores * (call.scale / call.softcap)) * call.softcap;
  if (mask.defined()) scores = scores + mask.to(scores.scalar_type());
  const double hidden = -std::numeric_limits<double>::infinity();
  scores = scores.masked_fill(seen.logical_not(), hidden);
  return at::matmul(at::_safe_softmax(scores, -1, std::nullopt), own(v));
}

void check(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
           const OptionalTensor& padding, at::IntArrayRef kv_heads, bool has_places) {
  check_floating(q, "q");
  check_same_dtype(k, "k", q, "q");
  check_same_dtype(v, "v", q, "q");
  TORCH_CHECK_VALUE(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && k.size(0) == q.size(0) &&
                        k.size(3) == q.size(3) && v.sizes().slice(0, 3) == k.sizes().slice(0, 3) &&
                        (!has_places || k.size(2) >= q.size(2)),
                    "k: shapes ", k.sizes(), " of it and ", v.sizes(),
                    " of v must be [batch, kv_heads, m, ..] for q ", q.sizes(),
                    ", [batch, heads, n, head_dim], m >= n if causal or with a window");
  if (kv_heads.empty()) {
    TORCH_CHECK_VALUE(k.size(1) == q.size(1), "kv_heads: must be given for ", k.size(1),
                      " heads of k and ", q.size(1), " of q");
  } else {
    TORCH_CHECK_VALUE(static_cast<int64_t>(kv_heads.size()) == q.size(1), "kv_heads: ", kv_heads,
                      " must have one for each of ", q.size(1), " heads of q");
  }
  for (const int64_t head : kv_heads)
    TORCH_CHECK_INDEX(head >= 0 && head < k.size(1), "kv_heads: ", head, " must be in [0, ",
                      k.size(1), ")");
  // Heads of q that share one of k are on several threads, and their gradients of it would need an
  // order. Training gives each its copy, whose gradients have one (block_copies)
  const bool recorded = q.requires_grad() || k.requires_grad() || v.requires_grad();
  TORCH_CHECK_VALUE(kv_heads.empty() || !at::GradMode::is_enabled() || !recorded,
                    "kv_heads: must not be given where gradients are recorded");
  // Rows are found by four indices, of which those of length 1 are repeated without a copy
  if (mask.has_value()) {
    TORCH_CHECK_VALUE(mask->dim() == 4, "mask: shape ", mask->sizes(), " must have 4 dims");
  }
  // Read as it is, a number per sequence on the host
  if (padding.has_value()) {
    TORCH_CHECK_VALUE(
        padding->dim() == 1 && padding->size(0) == q.size(0) && padding->scalar_type() == at::kLong,
        "padding: shape ", padding->sizes(), " must be [batch = ", q.size(0), "], int64");
  }
}

}  // namespace

Tensor block_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                       const OptionalTensor& mask, const OptionalTensor& padding,
                       at::IntArrayRef kv_heads, bool causal, std::optional<double> scale,
                       std::optional<int64_t> window, std::optional<double> softcap) {
  refuse_forward_mode(kBlockAttention, q, k, v);
  check(q, k, v, mask, padding, kv_heads, causal || window.has_value());
  const AttentionCall call{kv_heads.vec(), causal,
                           scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3)))), window,
                           softcap.value_or(0)};
  const Tensor added = additive(mask, q, k.size(2)), first = padding.value_or(Tensor());
  if (!q.is_cpu() || comm::traced(q)) return formula(q, k, v, added, first, call);
  const Tensor counts = first.defined() ? first.contiguous() : first;
  return BlockAttention::apply(q, k, v, optional(added), optional(counts), call);
}

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  autocast_to_low_precision<block_attention, 0, 1, 2>(m, "block_attention");
}

}  // namespace tp_ext
