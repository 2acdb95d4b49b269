// Cross entropy of a column linear's logits, whose columns (the vocabulary) are sharded, without
// the logits: they exist for one chunk of tokens at a time.
//
//   logits      x_c w^T + b                             of chunk c, [gather x_c]
//   statistics  four numbers a row of logits; all-gather; loss and lse of each row
//   dlogits     from logits and lse, in their place     vocab_loss.h
//   dx          sum over ranks of dlogits w, [local rows]; overlaps the GEMM of dw
//   dw, db      sum over chunks of dlogits^T x_c, of dlogits
//
// [..] marks the steps that sequence parallelism (SP) adds. There are two ways to the gradients:
// linear_cross_entropy_mean.cpp for means and sums, linear_cross_entropy_rows.cpp without a
// reduction and for entropies. Here: the operator, its checks, and the number of chunks.
//
// dw of half types is summed in fp32; with main_grad it is added there and autograd gets none.
// Neither backward writes to what it saved, so it can run again. Traced calls gather and reduce
// whole tensors, and write to none.

#include "autograd/linear_cross_entropy.h"
#include "autograd/autocast.h"
#include "autograd/function.h"
#include "autograd/linear_checks.h"
#include "autograd/linear_overlap.h"

namespace tp_ext {
namespace {

// The number of chunks: of chunk_tokens rows, or 22, but at least `fewest` rows each. Entropies hold
// four tensors of the size of a chunk's logits; products of half types on the CPU copies of
// operands.
int64_t chunks_of(const SymInt& rows, std::optional<int64_t> chunk_tokens, bool entropy,
                  bool copies, int64_t fewest) {
  if (chunk_tokens.has_value()) {
    TORCH_CHECK_VALUE(*chunk_tokens >= 1, "chunk_tokens: ", *chunk_tokens,
                      " must be at least 1, or None");
    return std::max<int64_t>(
        1, ((rows + (*chunk_tokens - 1)) / *chunk_tokens).guard_int(__FILE__, __LINE__));
  }
  const int64_t most = copies ? 28 : 22, least = entropy ? fewest / 4 : fewest;
  int64_t chunks = entropy ? 4 * most : most;
  while (chunks > 1 && rows < chunks * least) --chunks;
  return chunks;
}

// The fewest rows of a chunk. A chunk of half types on the CPU reads and writes the fp32 sum of dw,
// whose time is that of the products of some 60 rows: it has 256 rows, but no more than the weight
// has columns, so that its logits take no more memory than the dw that backward casts from the sum.
int64_t fewest_rows(const Tensor& weight, bool sums_wide) {
  constexpr int64_t fewest = 64, most = 256;
  if (!sums_wide) return fewest;
  return std::clamp(weight.sym_size(1).guard_int(__FILE__, __LINE__), fewest, most);
}

std::tuple<Tensor, Tensor> composed(const Tensor& x, const Tensor& weight,
                                    const OptionalTensor& bias, const Tensor& target,
                                    bool sequence_parallel, Sizes sizes,
                                    std::optional<int64_t> chunk_tokens, LinearLoss call) {
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
  const bool copies = x.is_cpu() && sum_dtype(x) != x.scalar_type();
  call.chunks = chunks_of(target.sym_numel(), chunk_tokens, call.entropy, copies,
                          fewest_rows(weight, copies && needs_graph(weight)));

  const Tensor rows = as_rows(x), targets = target.reshape_symint({target.sym_numel()});
  const bool graph = needs_graph(x) || needs_graph(weight) || (bias && needs_graph(*bias));
  if (graph && call.reduction != "none" && !call.entropy)
    return {mean_loss(rows, weight, bias, targets, call), x.new_empty({0})};
  auto [loss, entropy] = row_losses(rows, weight, bias, targets, call, graph);
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

// Under autocast the product is in the low precision, as a linear's, and the loss in fp32, as that
// of torch's cross_entropy
template <bool kAutocast, c10::DeviceType device = c10::kCPU>
std::tuple<Tensor, Tensor> linear_cross_entropy(
    const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& target,
    const std::string& group, SymInt vocab_start, SymInt vocab_local, SymInt vocab_size,
    int64_t ignore_index, double label_smoothing, double z_loss, const std::string& reduction,
    bool sequence_parallel, Sizes sizes, const OptionalTensor& main_grad, bool entropy,
    std::optional<int64_t> chunk_tokens, bool vocab_size_given) {
  LinearLoss call{{group, vocab_start, vocab_local, vocab_size, vocab_size_given, ignore_index,
                   label_smoothing, z_loss},
                  reduction,
                  entropy,
                  {},
                  1,
                  main_grad,
                  x.scalar_type()};
  if constexpr (!kAutocast)
    return composed(x, weight, bias, target, sequence_parallel, sizes, chunk_tokens, call);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKey<device>);
  const auto low = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const auto& t) { return at::autocast::cached_cast(low, t, device); };
  const Tensor x_low = cast(x);
  call.loss_dtype = x_low.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return composed(x_low, cast(weight), cast(bias), target, sequence_parallel, sizes, chunk_tokens,
                  call);
}

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  impl_composite<linear_cross_entropy<false>>(m, "linear_cross_entropy");
  impl_autocast<c10::kCPU, linear_cross_entropy<true, c10::kCPU>>(m, "linear_cross_entropy");
  impl_autocast<c10::kCUDA, linear_cross_entropy<true, c10::kCUDA>>(m, "linear_cross_entropy");
}

}  // namespace
}  // namespace tp_ext
