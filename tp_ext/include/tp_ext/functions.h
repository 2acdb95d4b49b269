// The regions, the loss, the choice of tokens, seeds and clipping.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "tp_ext/export.h"
#include "tp_ext/group.h"

namespace torch::nn {
class Module;
}

namespace tp_ext {

// The regions: differentiable collectives, named after their forward. All are linear; inputs and
// upstream gradients are never written; of one rank the result is the input, and nothing is
// communicated. Errors: c10::IndexError for a dim that x does not have, c10::ValueError for sizes
// that do not fit.

/// Enters sharded work with a replicated tensor: y = x; dx = the sum over the ranks of dy.
/// Communicates: backward, one all-reduce.
TP_EXT_API at::Tensor copy_to_region(const at::Tensor& x, const ParallelGroup& group);

/// Leaves sharded work whose results are partial sums: y = the sum over the ranks of x; dx = dy.
/// Communicates: forward, one all-reduce.
TP_EXT_API at::Tensor reduce_from_region(const at::Tensor& x, const ParallelGroup& group);

/// Slices a replicated x [.., n, ..]: y = this rank's slice of dim; dx = the ranks' dy,
/// concatenated. sizes: one length per rank, their sum n; default as torch.tensor_split.
/// Communicates: backward, one all-gather.
TP_EXT_API at::Tensor scatter_to_region(const at::Tensor& x, const ParallelGroup& group,
                                        int64_t dim = -1, at::IntArrayRef sizes = {});

/// Concatenates the ranks' x along dim, for replicated work; dx = this rank's slice of dy. sizes:
/// one length per rank; default all equal to this rank's. Communicates: forward, one all-gather.
TP_EXT_API at::Tensor gather_from_region(const at::Tensor& x, const ParallelGroup& group,
                                         int64_t dim = -1, at::IntArrayRef sizes = {});

/// Concatenates the ranks' x along dim, for sharded work; dx = this rank's slice of the sum of dy.
/// Communicates: forward, one all-gather; backward, one reduce-scatter.
TP_EXT_API at::Tensor all_gather_region(const at::Tensor& x, const ParallelGroup& group,
                                        int64_t dim = 0, at::IntArrayRef sizes = {});

/// Sums x over the ranks: y = this rank's slice of the sum along dim; dx = the ranks' dy,
/// concatenated. Communicates: forward, one reduce-scatter; backward, one all-gather.
TP_EXT_API at::Tensor reduce_scatter_region(const at::Tensor& x, const ParallelGroup& group,
                                            int64_t dim = 0, at::IntArrayRef sizes = {});

/// Sends slice k of split_dim to rank k: y = the slices of ranks 0, 1, .. concatenated along
/// concat_dim. Communicates: one all-to-all forward, one backward.
TP_EXT_API at::Tensor all_to_all_region(const at::Tensor& x, const ParallelGroup& group,
                                        int64_t split_dim, int64_t concat_dim,
                                        at::IntArrayRef split_sizes = {},
                                        at::IntArrayRef concat_sizes = {});

/// Options of vocab_parallel_cross_entropy and of the loss of a head.
struct CrossEntropyOptions {
  std::optional<int64_t> vocab_size = {};  ///< V; default p times the width of this rank's columns
  int64_t ignore_index = -100;             ///< rows with this target have no loss and no gradient
  double label_smoothing = 0.0;            ///< over the full vocabulary
  double z_loss = 0.0;
  std::string reduction = "mean";  ///< "none", "mean" over the rows that are not ignored, or "sum"
};

/// The cross entropy of logits [.., vocab_local] whose columns are sharded as by
/// torch.tensor_split: with x a row of the full logits, t its target, e the smoothing,
/// (1 - e) (logsumexp(x) - x[t]) + e (logsumexp(x) - sum(x) / V) + z_loss logsumexp(x)^2.
/// targets [..], int64, ids in the full vocabulary, the same on all ranks.
///
/// Communicates: forward, one all-gather of four numbers a row. Errors: c10::ValueError for shapes
/// and options that do not fit, on all ranks; c10::IndexError for a target outside of the
/// vocabulary.
TP_EXT_API at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits,
                                                   const at::Tensor& targets,
                                                   const ParallelGroup& group,
                                                   const CrossEntropyOptions& options = {});

/// Options of vocab_parallel_argmax and vocab_parallel_sample.
struct SampleOptions {
  std::optional<int64_t> vocab_size = {};  ///< as of the loss
  double temperature = 1.0;                ///< 0: the argmax, which draws nothing
  std::optional<int64_t> top_k = {};       ///< only ids whose logit is at least the k-th largest
  /// Only the fewest most likely ids, after temperature and top_k, whose probabilities add up to it
  std::optional<double> top_p = {};
};

/// The ids [..] of the largest logits [.., vocab_local], int64, the same on all ranks; of equal
/// logits the lowest id. Communicates: one all-gather of two numbers a row.
TP_EXT_API at::Tensor vocab_parallel_argmax(const at::Tensor& logits, const ParallelGroup& group,
                                            const SampleOptions& options = {});

/// Draws ids [..] from softmax(logits / temperature), the same on all ranks and for every number of
/// them, by one seed of torch's default generator.
///
/// Communicates as vocab_parallel_argmax; with top_k another all-gather of min(top_k, vocab_local)
/// + 1 numbers a row, with top_p alone one of the logits. Errors: c10::ValueError for a temperature
/// that is negative or not finite, top_k below 1, top_p outside of (0, 1].
TP_EXT_API at::Tensor vocab_parallel_sample(const at::Tensor& logits, const ParallelGroup& group,
                                            const SampleOptions& options = {});

/// Seeds torch's default generators; the same seed on all ranks.
TP_EXT_API void manual_seed(int64_t seed);

/// Multiplies the gradients of the module by min(1, max_norm / (norm + 1e-6)), with the norm of the
/// unsharded model's gradient; returns that norm, the same on all ranks, in the widest dtype of the
/// gradients. Communicates: one all-reduce of a number over each group of its layers.
TP_EXT_API at::Tensor clip_grad_norm_(const torch::nn::Module& module, double max_norm);

}  // namespace tp_ext
