// A collective or message as one rank of several in this process issued it, and its execution for
// all ranks at once, in the order of the ranks.

#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shm/reduce_op.h"

namespace tp_ext::simulate {

using Tensors = std::vector<at::Tensor>;

struct Call {
  std::string kind;                           // "all_reduce", ..
  at::Tensor shown{};                         // in errors; all ranks must have its dtype
  Tensors sends{};                            // [k] goes to rank k; empty, or undefined: nothing
  Tensors receives{};                         // [k] comes from rank k
  std::optional<shm::Operation> operation{};  // of what all ranks send here; receives is the result
  int root = -1;                              // or the peer of a message, -1 for any
  int tag = 0;                                // of a message
  bool same_shape = false;                    // whether all ranks must have the shape of `shown`
  Tensors results{};
  bool done = false;

  // Whether the calls of two ranks can be one collective, as far as each shows alone
  bool fits(const Call& other) const;
  std::string text() const;  // for errors
};
using CallPtr = std::shared_ptr<Call>;

// Executes the calls of all ranks of a group, in the order of the ranks, with the bits of tp_shm.
// If a rank sends what another does not expect, does nothing and returns the two.
std::optional<std::pair<int, int>> execute(const std::vector<CallPtr>& calls);

// Delivers a message; false: they differ in dtype or number of elements
bool deliver(const Call& send, const Call& receive);

// Waits until a tensor that is not on the CPU has been computed
void synchronize(const at::Tensor& t);

}  // namespace tp_ext::simulate
