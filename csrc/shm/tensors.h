// Tensors as the memory that collectives read and write.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "shm/core/rows.h"
#include "shm/reduce_op.h"
#include "tp_ext/export.h"

namespace tp_ext::shm {

using Tensors = std::vector<at::Tensor>;

// These raise ValueError or TypeError unless: CPU and strided; one tensor; the same dtype; a given
// number of elements; as many outputs as inputs
void check_tensor(const at::Tensor& t);
const at::Tensor& only(const Tensors& tensors);
void check_same(const at::Tensor& a, const at::Tensor& b);
void check_numel(const at::Tensor& t, int64_t numel, const char* name);
TP_EXT_API void check_lists(const Tensors& out, const Tensors& in);

// Complex numbers are pairs of reals, for sums and copies alike. Shapes that differ in dims of size
// 1 are equal: a 0-d tensor may meet one of shape [1].
TP_EXT_API at::Tensor as_reals(const at::Tensor& t);
TP_EXT_API Elements elements_of(const at::Tensor& t, Operation operation);

int64_t bytes_of(const at::Tensor& t);
uint32_t type_of(const at::Tensor& t);  // c10's number of its dtype
void* data(const at::Tensor& t);
std::optional<Rows> rows_of(const at::Tensor& t);  // of one that is not only rows of bytes: none

// Contiguous substitutes for tensors that are not contiguous, copied back by store()
class Outputs {
 public:
  at::Tensor add(const at::Tensor& t, bool load);
  void store() const;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

// One block of a contiguous tensor per rank, `sizes` rows of dim 0 each; empty: equal blocks
struct Blocks {
  std::vector<void*> at;
  std::vector<int64_t> bytes;
};
Blocks divide(const at::Tensor& t, const std::vector<int64_t>& sizes, int ranks, const char* name);

}  // namespace tp_ext::shm
