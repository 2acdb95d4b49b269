// Cross entropy of a column linear's logits, whose columns (the vocabulary) are sharded, without the
// logits: they exist for one chunk of tokens at a time.
//
//   logits      x_c w^T + b                             of chunk c, [gather x_c]
//   statistics  four numbers a row of logits; all-gather; loss and lse of each row
//   dlogits     from logits and lse, in their place     vocab_loss.h
//   dx          sum over ranks of dlogits w, [local rows]; overlaps the GEMM of dw
//   dw, db      sum over chunks of dlogits^T x_c, of dlogits
//
// [..] marks the steps that sequence parallelism (SP) adds. Two ways to the gradients:
//
//   ScalarLoss  mean and sum: forward computes the gradients for an upstream gradient of 1 while it
//               has the logits, three GEMMs in all; backward scales them. Saved: dx, dw, db
//   TokenLosses no reduction, or entropies: upstream gradients, one a token, are known in backward
//               only, which computes the logits again, four GEMMs. Saved: x, w, b, lse
//
// dw of half types is summed in fp32; with main_grad it is added there and autograd gets none.
// Neither backward writes to what it saved, so it can run again. Traced calls gather and reduce
// whole tensors, and write to none.

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <limits>

#include "autograd/differentiation.h"
#include "autograd/linear_checks.h"
#include "autograd/linear_overlap.h"
#include "autograd/main_grad.h"
#include "autograd/token_chunks.h"
#include "autograd/vocab_chunk.h"
#include "autograd/vocab_loss.h"

namespace tp_ext {
namespace {

using c10::SymInt;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Call : VocabLoss {
  std::string reduction{};
  bool entropy = false;
  Split rows_of_ranks{};  // under SP; else empty
  int64_t chunks = 1;
  OptionalTensor main_grad{};
  at::ScalarType loss_dtype = at::kFloat;

  bool sequence_parallel() const { return !rows_of_ranks.sizes.empty(); }

  void put(AutogradContext* ctx) const {
    VocabLoss::put(ctx);
    auto& data = ctx->saved_data;
    data["entropy"] = entropy;
    data["rows_of_ranks"] = c10::SymIntArrayRef(rows_of_ranks.sizes);
    data["chunks"] = chunks;
    if (main_grad.has_value()) data["main_grad"] = *main_grad;
  }
  static Call get(AutogradContext* ctx) {
    auto& data = ctx->saved_data;
    Call call{VocabLoss::get(ctx)};
    call.entropy = data["entropy"].toBool();
    call.rows_of_ranks.sizes = data["rows_of_ranks"].toSymIntVector();
    call.chunks = data["chunks"].toInt();
    if (data.count("main_grad") > 0) call.main_grad = data["main_grad"].toTensor();
    return call;
  }
};

// Skips autograd dispatch inside a Function unless the call is traced
struct Unrecorded {
  std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
  explicit Unrecorded(bool traced) {
    if (!traced) guard.emplace();
  }
};

// Values of rows that come chunk by chunk, in the order of all rows
class Collected {
 public:
  Collected(SymInt rows, bool traced) : rows_(std::move(rows)), traced_(traced) {}

  void put(const Tensor& part, const Chunk& chunk) {
    if (traced_) return parts_.push_back(part);  // in order: one range a chunk
    if (parts_.empty()) {
      auto shape = part.sym_sizes().vec();
      shape[0] = rows_;
      parts_.push_back(part.new_empty_symint(shape));
    }
    for (size_t k = 0; k < chunk.full.size(); ++k)
      tokens_of(parts_[0], chunk.full[k]).copy_(tokens_of(part, chunk.gathered[k]));
  }
  Tensor all() const { return traced_ ? at::cat(parts_) : parts_[0]; }

 private:
  SymInt rows_;
  bool traced_;
  std::vector<Tensor> parts_;
};

Tensor rows_in(const Tensor& all, const Chunk& chunk) {
  if (chunk.full.size() == 1) return tokens_of(all, chunk.full[0]);
  std::vector<Tensor> parts;
  for (const auto& range : chunk.full) parts.push_back(tokens_of(all, range));
  return at::cat(parts);
}

// The chunks of x [rows, in], this rank's rows under SP, and their logits
class Chunks {
 public:
  Chunks(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Call& call)
      : traced(comm::traced(x)), call_(call), x_(x), weight_(weight), bias_(bias) {
    lengths_ = call.sequence_parallel() && !traced ? call.rows_of_ranks.sizes : std::vector{rows()};
    if (call.sequence_parallel() && traced)
      x_ = comm::all_gather(x, call.group, 0, call.rows_of_ranks);
  }

  const bool traced;

  SymInt rows() const {
    return call_.sequence_parallel() ? call_.rows_of_ranks.total() : x_.sym_size(0);
  }

  // body(chunk, x, logits) for each; body may write to logits unless the call is traced
  template <typename Body>
  void each(const Body& body) {
    const bool gathers = lengths_.size() > 1;
    std::optional<comm::Pending> coming;
    const auto issue = [&](int64_t i) {
      if (!gathers || i >= call_.chunks) return;
      const Tensor own =
          tokens_of(x_, chunk_of(lengths_[comm::rank(call_.group)], i, call_.chunks));
      coming.emplace(
          comm::all_gather_async(own, call_.group, 0, Chunk(lengths_, i, call_.chunks).tokens));
    };
    LogitsBuffer buffer(weight_, bias_, traced);
    issue(0);
    for (int64_t i = 0; i < call_.chunks; ++i) {
      const Chunk chunk(lengths_, i, call_.chunks);
      const Tensor x = gathers ? coming->wait() : tokens_of(x_, chunk.full[0]);
      issue(i + 1);
      body(chunk, x, buffer.logits(x));
    }
  }

 private:
  const Call& call_;
  Tensor x_, weight_;
  OptionalTensor bias_;
  std::vector<SymInt> lengths_;
};

// The gradients of x, weight and bias as sums over chunks; the sum over ranks of a chunk's dx
// overlaps the GEMM of its dw and the next logits
class Gradients {
 public:
  Tensor dx, dw, db;

  Gradients(const Tensor& x, const Tensor& weight, const Call& call, bool traced, bool wants_x,
            bool wants_w, bool wants_b, const OptionalTensor& main_grad)
      : call_(call),
        x_(x),
        weight_(weight),
        traced_(traced),
        wants_x_(wants_x),
        wants_w_(wants_w),
        wants_b_(wants_b),
        main_grad_(main_grad) {}

  void add(const Chunk& chunk, const Tensor& x, const Tensor& dlogits) {
    if (wants_x_) add_x(chunk, input_grad(dlogits, weight_, traced_));
    if (wants_w_) {
      if (main_grad_.has_value())
        add_weight_grad(*main_grad_, dlogits, x);
      else
        sum_weight_grad(dw, dlogits, x, traced_);
    }
    if (wants_b_) {
      const Tensor part = dlogits.sum(0, false, sum_dtype(dlogits));
      db = db.defined() ? at::add(db, part) : part;
    }
  }

  void finish() {
    if (pending_) take();
    if (!traced_ || !wants_x_) return;
    dx = at::cat(parts_);
    dx = call_.sequence_parallel() ? comm::reduce_scatter(dx, call_.group, 0, call_.rows_of_ranks)
                                   : comm::all_reduce_fresh(dx, call_.group);
  }

 private:
  void add_x(const Chunk& chunk, const Tensor& part) {
    if (traced_) return parts_.push_back(part);
    if (pending_) take();
    pending_.emplace(call_.sequence_parallel()
                         ? comm::reduce_scatter_async(part, call_.group, 0, chunk.tokens)
                         : comm::all_reduce_async(part, call_.group));
    to_ =
        call_.sequence_parallel() ? chunk_of(x_.sym_size(0), taken_, call_.chunks) : chunk.full[0];
    ++taken_;
  }
  void take() {
    const Tensor part = pending_->wait();
    pending_.reset();
    if (!dx.defined()) dx = x_.new_empty_symint(x_.sym_sizes());
    tokens_of(dx, to_).copy_(part);
  }

  const Call& call_;
  const Tensor &x_, &weight_;
  const bool traced_, wants_x_, wants_w_, wants_b_;
  const OptionalTensor main_grad_;
  std::vector<Tensor> parts_;
  std::optional<comm::Pending> pending_;
  Range to_;
  int64_t taken_ = 0;
};

// The logarithms of the probabilities of this rank's columns, in the dtype of lse
Tensor log_probabilities(const Tensor& logits, const Tensor& lse, const Call& call) {
  const Tensor own = logits.narrow_symint(1, 0, call.vocab_local);
  return cast(own, lse.scalar_type()).sub(lse.narrow(1, 0, 1)).sub(lse.narrow(1, 1, 1));
}
// p (log p + entropy), 0 where p is: a masked column has log p = -inf
Tensor weighted(const Tensor& log_p, const Tensor& entropy) {
  return log_p.exp().mul(
      log_p.clamp_min(std::numeric_limits<float>::lowest()).add(entropy.unsqueeze(1)));
}
// This rank's part of -sum p log p
Tensor entropies(const Tensor& logits, const Tensor& lse, const Call& call) {
  const Tensor log_p = log_probabilities(logits, lse, call);
  return weighted(log_p, lse.new_zeros_symint({lse.sym_size(0)})).sum(1).neg();
}

// d entropy / d logits_j = -p_j (log p_j + entropy)
Tensor add_entropy_grad(const Tensor& dlogits, const Tensor& logits, const Tensor& lse,
                        const Tensor& entropy, const Tensor& grad, const Call& call) {
  Tensor own = weighted(log_probabilities(logits, lse, call), entropy).mul(grad.unsqueeze(1));
  const auto padding = logits.sym_size(1) - call.vocab_local;
  if (padding != 0) own = at::constant_pad_nd_symint(own, {0, padding}, 0);
  return cast(cast(dlogits, own.scalar_type()).sub(own), dlogits.scalar_type());
}

struct RowResults {
  Tensor losses, lse, entropies;
};

// Losses and what backward needs of each row, without gradients. One exchange; with entropies, which
// need lse while the logits exist, one a chunk and one of the sums.
RowResults row_results(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                       const Tensor& target, const Call& call) {
  Chunks chunks(x, weight, bias, call);
  Collected stats(chunks.rows(), chunks.traced), entropy = stats, losses = stats, lse = stats;
  Tensor shard_row;
  chunks.each([&](const Chunk& chunk, const Tensor&, const Tensor& logits) {
    const Tensor targets = rows_in(target, chunk), own = call.stats(logits, targets);
    if (!call.entropy) {
      const auto rows = targets.sym_size(0);
      stats.put(own.narrow_symint(0, 0, rows), chunk);
      shard_row = own.narrow_symint(0, rows, own.sym_size(0) - rows);
      return;
    }
    const auto [loss_c, lse_c] = call.rows(own, targets);
    losses.put(loss_c, chunk);
    lse.put(lse_c, chunk);
    entropy.put(entropies(logits, lse_c, call), chunk);
  });
  if (!call.entropy) {
    auto [loss, log_sums] = call.rows(at::cat({stats.all(), shard_row}), target);
    return {loss, log_sums, Tensor()};
  }
  const Tensor sum = comm::all_reduce_fresh(entropy.all(), call.group);
  const Tensor kept = target.ne(call.ignore_index);
  return {losses.all(), lse.all(), at::where(kept, sum, at::zeros({}, sum.options()))};
}

// Gradients of fp16 logits are computed times this: probabilities of 1e-6 are subnormal numbers
constexpr double kFp16Scale = 256;

// Of a 0-d tensor on the CPU, of fp32 or fp64
bool is_one(const Tensor& t) {
  return t.scalar_type() == at::kDouble ? *t.const_data_ptr<double>() == 1
                                        : *t.const_data_ptr<float>() == 1;
}

struct ScalarLoss : Function<ScalarLoss> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const Tensor& target, const Call& call) {
    const bool wants_x = x.requires_grad(), wants_w = weight.requires_grad();
    const bool wants_b = bias.has_value() && bias->requires_grad(), traced = comm::traced(x);
    const Unrecorded guard(traced);
    Chunks chunks(x, weight, bias, call);
    Gradients grads(x, weight, call, traced, wants_x, wants_w, wants_b, std::nullopt);
    Collected losses(chunks.rows(), traced);
    const auto dtype = sum_dtype(x);
    const bool fp16 = x.scalar_type() == at::kHalf;
    const Tensor one = at::full({}, 1, x.options().dtype(dtype));
    Tensor unit = call.reduction == "mean" ? one.div(call.counted_rows(target)) : one, factor;
    if (fp16) std::tie(unit, factor) = std::pair(one.mul(kFp16Scale), unit.div(kFp16Scale));
    chunks.each([&](const Chunk& chunk, const Tensor& x_chunk, const Tensor& logits) {
      const Tensor targets = rows_in(target, chunk);
      const auto [loss, lse] = call.rows(call.stats(logits, targets), targets);
      losses.put(loss, chunk);
      const Tensor grad = unit.expand_symint({targets.sym_size(0)});
      Tensor dlogits = logits;
      if (traced)
        dlogits = call.backward(grad, logits, targets, lse);
      else
        call.backward_(grad, logits, targets, lse);
      grads.add(chunk, x_chunk, dlogits);
    });
    grads.finish();
    ctx->save_for_backward({grads.dx, grads.dw, grads.db, factor});
    auto& data = ctx->saved_data;
    data["dtype"] = static_cast<int64_t>(x.scalar_type());
    if (call.main_grad.has_value()) data["main_grad"] = *call.main_grad;
    const Tensor sum = losses.all().sum();
    return cast(call.reduction == "mean" ? sum.div(call.counted_rows(target)) : sum,
                call.loss_dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    refuse_double_backward("linear_cross_entropy", upstream);
    const auto saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const auto dtype = static_cast<at::ScalarType>(data["dtype"].toInt());
    const bool traced = comm::traced(upstream[0]);
    const Unrecorded guard(traced);
    Tensor scale = cast(upstream[0], dtype == at::kDouble ? at::kDouble : at::kFloat);
    if (saved[3].defined()) scale = scale.mul(saved[3]);
    // What is returned may be written to, and what is saved must not be if backward can come again
    const bool as_saved = !traced && scale.device().is_cpu() &&
                          !torch::autograd::get_current_graph_task_keep_graph() && is_one(scale);
    const auto scaled = [&](const Tensor& saved_grad) {
      const auto from = cast(saved_grad, scale.scalar_type());
      return cast(as_saved ? from : from.mul(scale), dtype);
    };
    variable_list grads(5);
    if (saved[0].defined() && ctx->needs_input_grad(0)) grads[0] = scaled(saved[0]);
    if (saved[1].defined() && ctx->needs_input_grad(1)) {
      if (data.count("main_grad") > 0) {
        const Tensor main_grad = data["main_grad"].toTensor();
        const auto to = main_grad.scalar_type();
        main_grad.addcmul_(cast(saved[1], to), cast(scale, to));
        grads[1] = grad_beside(main_grad, cast(upstream[0], dtype), 1);
      } else {
        grads[1] = scaled(saved[1]);
      }
    }
    if (saved[2].defined() && ctx->needs_input_grad(2)) grads[2] = scaled(saved[2]);
    return grads;
  }
};

struct TokenLosses : Function<TokenLosses> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const OptionalTensor& bias, const Tensor& target, const Call& call) {
    const Unrecorded guard(comm::traced(x));
    const auto results = row_results(x, weight, bias, target, call);
    ctx->save_for_backward(
        {x, weight, bias.value_or(Tensor()), target, results.lse, results.entropies});
    call.put(ctx);
    if (!call.entropy) return {results.losses};
    return {results.losses, results.entropies};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    refuse_double_backward("linear_cross_entropy", upstream);
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &target = saved[3], &lse = saved[4];
    const OptionalTensor bias = saved[2].defined() ? OptionalTensor(saved[2]) : std::nullopt;
    const auto call = Call::get(ctx);
    const bool traced = comm::traced(x);
    const bool wants_w = ctx->needs_input_grad(1);
    const Unrecorded guard(traced);
    Chunks chunks(x, weight, bias, call);
    Gradients grads(x, weight, call, traced, ctx->needs_input_grad(0), wants_w,
                    bias.has_value() && ctx->needs_input_grad(2), call.main_grad);
    Tensor grad_entropy;
    if (call.entropy) {
      const Tensor kept = target.ne(call.ignore_index);
      grad_entropy = at::where(kept, upstream[1], at::zeros({}, upstream[1].options()));
    }
    chunks.each([&](const Chunk& chunk, const Tensor& x_chunk, const Tensor& logits) {
      const Tensor targets = rows_in(target, chunk), log_sums = rows_in(lse, chunk);
      const Tensor grad = rows_in(upstream[0], chunk);
      Tensor dlogits = logits;
      if (traced || call.entropy)
        dlogits = call.backward(grad, logits, targets, log_sums);
      else
        call.backward_(grad, logits, targets, log_sums);
      if (call.entropy)
        dlogits = add_entropy_grad(dlogits, logits, log_sums, rows_in(saved[5], chunk),
                                   rows_in(grad_entropy, chunk), call);
      grads.add(chunk, x_chunk, dlogits);
    });
    grads.finish();
    const auto dtype = x.scalar_type();
    variable_list result(5);
    result[0] = grads.dx;
    if (grads.dw.defined()) result[1] = cast(grads.dw, dtype);
    if (wants_w && call.main_grad.has_value())
      result[1] = grad_beside(*call.main_grad, cast(upstream[0], dtype), 1);
    if (grads.db.defined()) result[2] = cast(grads.db, dtype);
    return result;
  }
};

// The number of chunks: of chunk_tokens rows, or 22, but at least 64 rows each. Entropies hold four
// tensors of the size of a chunk's logits.
int64_t chunks_of(const SymInt& rows, std::optional<int64_t> chunk_tokens, bool entropy) {
  constexpr int64_t most = 22, fewest = 64;
  if (chunk_tokens.has_value()) {
    TORCH_CHECK_VALUE(*chunk_tokens >= 1, "chunk_tokens: ", *chunk_tokens,
                      " must be at least 1, or None");
    return std::max<int64_t>(
        1, ((rows + (*chunk_tokens - 1)) / *chunk_tokens).guard_int(__FILE__, __LINE__));
  }
  int64_t chunks = entropy ? 4 * most : most;
  const int64_t least = entropy ? fewest / 4 : fewest;
  while (chunks > 1 && rows < chunks * least) --chunks;
  return chunks;
}

std::tuple<Tensor, Tensor> composed(const Tensor& x, const Tensor& weight,
                                    const OptionalTensor& bias, const Tensor& target,
                                    bool sequence_parallel, Sizes sizes,
                                    std::optional<int64_t> chunk_tokens, Call call) {
  refuse_forward_mode("linear_cross_entropy", x, weight, bias);
  check_linear(x, weight, bias, call.main_grad, 1);
  TORCH_CHECK_TYPE(target.scalar_type() == at::kLong, "target: dtype ", target.scalar_type(),
                   " must be int64");
  call.check(call.reduction);
  const int64_t p = comm::size(call.group);
  auto shape = x.sym_sizes().vec();
  shape.pop_back();
  if (sequence_parallel && p > 1) {
    call.rows_of_ranks = split_local(tokens_of(x), comm::rank(call.group), p, sizes);
    shape[0] = call.rows_of_ranks.total();
    SymInt inner = 1;
    for (size_t dim = 1; dim < shape.size(); ++dim) inner = inner * shape[dim];
    for (auto& rows : call.rows_of_ranks.sizes) rows = rows * inner;
  }
  TORCH_CHECK_VALUE(target.sym_sizes() == c10::SymIntArrayRef(shape), "target: shape ",
                    target.sym_sizes(), " must be ", c10::SymIntArrayRef(shape),
                    ", that of x without the last dim", sequence_parallel ? ", of all ranks" : "");
  call.chunks = chunks_of(target.sym_numel(), chunk_tokens, call.entropy);

  const Tensor rows = as_rows(x), targets = target.reshape_symint({target.sym_numel()});
  const bool graph = needs_graph(x) || needs_graph(weight) || (bias && needs_graph(*bias));
  if (graph && call.reduction != "none" && !call.entropy)
    return {ScalarLoss::apply(rows, weight, bias, targets, call), x.new_empty({0})};
  Tensor loss, entropy;
  if (graph) {
    const auto results = TokenLosses::apply(rows, weight, bias, targets, call);
    loss = results[0];
    if (call.entropy) entropy = results[1];
  } else {
    const auto results = row_results(rows, weight, bias, targets, call);
    loss = results.losses, entropy = results.entropies;
  }
  if (call.reduction == "none") {
    loss = loss.view_symint(shape);
  } else {
    loss = loss.sum();
    if (call.reduction == "mean") loss = loss.div(call.counted_rows(targets));
  }
  loss = cast(loss, call.loss_dtype);
  if (!call.entropy) return {loss, x.new_empty({0})};
  return {loss, cast(entropy.view_symint(shape), call.loss_dtype)};
}

std::tuple<Tensor, Tensor> linear_cross_entropy(
    const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& target,
    const std::string& group, SymInt vocab_start, SymInt vocab_local, SymInt vocab_size,
    int64_t ignore_index, double label_smoothing, double z_loss, const std::string& reduction,
    bool sequence_parallel, Sizes sizes, const OptionalTensor& main_grad, bool entropy,
    std::optional<int64_t> chunk_tokens, bool vocab_size_given) {
  return composed(x, weight, bias, target, sequence_parallel, sizes, chunk_tokens,
                  {{group, vocab_start, vocab_local, vocab_size, vocab_size_given, ignore_index,
                    label_smoothing, z_loss},
                   reduction,
                   entropy,
                   {},
                   1,
                   main_grad,
                   x.scalar_type()});
}

// The product in the low precision, as a linear's; the loss in fp32, as that of torch's
// cross_entropy
template <c10::DispatchKey key, c10::DeviceType device>
std::tuple<Tensor, Tensor> autocast(const Tensor& x, const Tensor& weight,
                                    const OptionalTensor& bias, const Tensor& target,
                                    const std::string& group, SymInt vocab_start,
                                    SymInt vocab_local, SymInt vocab_size, int64_t ignore_index,
                                    double label_smoothing, double z_loss,
                                    const std::string& reduction, bool sequence_parallel,
                                    Sizes sizes, const OptionalTensor& main_grad, bool entropy,
                                    std::optional<int64_t> chunk_tokens, bool vocab_size_given) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
  const auto low = at::autocast::get_autocast_dtype(device);
  const auto to_low = [&](const Tensor& t) { return at::autocast::cached_cast(low, t, device); };
  const Tensor x_low = to_low(x);
  return composed(x_low, to_low(weight), bias ? OptionalTensor(to_low(*bias)) : bias, target,
                  sequence_parallel, sizes, chunk_tokens,
                  {{group, vocab_start, vocab_local, vocab_size, vocab_size_given, ignore_index,
                    label_smoothing, z_loss},
                   reduction,
                   entropy,
                   {},
                   1,
                   main_grad,
                   x_low.scalar_type() == at::kDouble ? at::kDouble : at::kFloat});
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<linear_cross_entropy>(m, "linear_cross_entropy");
}
TORCH_LIBRARY_IMPL(tp_ext, AutocastCPU, m) {
  impl_composite<autocast<c10::DispatchKey::AutocastCPU, c10::kCPU>>(m, "linear_cross_entropy");
}
TORCH_LIBRARY_IMPL(tp_ext, AutocastCUDA, m) {
  impl_composite<autocast<c10::DispatchKey::AutocastCUDA, c10::kCUDA>>(m, "linear_cross_entropy");
}

}  // namespace
}  // namespace tp_ext
