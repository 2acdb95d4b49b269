// How a full tensor is sharded: the rule of tp_ext/sharding.py, for the layers of C++.
// [Note: the rule of shards in C++]

#pragma once

#include <string>
#include <vector>

#include "tp_ext/nn.h"

namespace tp_ext::nn {

// The module and those inside, with the prefixes of the names of their parameters
std::vector<std::pair<std::string, const torch::nn::Module*>> layers_of(
    const torch::nn::Module& module);

// Elements [start, start + length) of a local dim, and where they are in the full dim
struct Share {
  int64_t start, full_start, length;
  bool owned;  // whether this rank counts them: of copies the first
};

int64_t full_size(const Sharding& sharding);
int64_t local_size(const Sharding& sharding, const ParallelGroup& group);
// [start, stop) of the rank's share of a part
TP_EXT_API std::pair<int64_t, int64_t> span(const Part& part, const ParallelGroup& group);
std::vector<Share> shares(const Sharding& sharding, const ParallelGroup& group);

// The full tensor of the ranks' shards. Communicates: one all-gather
at::Tensor unshard(const at::Tensor& local, const Sharding& sharding, const ParallelGroup& group);

// The parts of q, and of k and v; raises where heads cannot be shared out
TP_EXT_API std::pair<Part, Part> head_parts(int64_t num_heads, int64_t num_kv_heads,
                                            int64_t head_dim, int64_t p);

// A fresh seed, rank 0's on all ranks of the group, from the default generator of the device
at::Tensor draw_seed(const at::Device& device, const ParallelGroup& group);

// Fills a shard with what the initialiser draws for the full tensor
void initialise(const at::Tensor& local, const ParallelModule::Parameter& parameter,
                const ParallelGroup& group);

// The width, first column and vocabulary of this rank's columns of logits
struct VocabColumns {
  int64_t start, local, full;
};
TP_EXT_API VocabColumns vocab_columns(int64_t width, std::optional<int64_t> vocab_size,
                                      const ParallelGroup& group);

// The lengths of torch.tensor_split
std::vector<c10::SymInt> split_sizes(int64_t n, int64_t p);

}  // namespace tp_ext::nn
