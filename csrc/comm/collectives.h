// Collectives on a process group given by name. Out of place: inputs are not written unless stated.
// Each has three forms, chosen per call:
//
//   direct        c10d on the current stream, waited for (eager)
//   functional    the _c10d_functional operators, visible to torch.compile, FakeTensor and
//                 dispatch modes (traced)
//   asynchronous  returns Pending: overlaps the caller's computation (traced: waits at once)
//
// group_name.h describes the name of a group; "" is no group. Only collectives.cpp uses c10d, and
// counter.cpp, which counts the calls of its operators.

#pragma once

#include <ATen/core/Tensor.h>
#include <functional>
#include <string>
#include <vector>

#include "comm/split.h"
#include "row_end.h"
#include "tp_ext/export.h"

namespace tp_ext::comm {

// Whether a dispatch mode (compile, CommDebugMode, selective checkpointing) or a tensor subclass is
// active. Tensors that these have recorded must not be written to.
bool traced(const at::Tensor& x);

// Raises if the process group of that name has another rank or size than the key, that is, if it
// was created again. Every collective does this first; a function that only reads rank() or size()
// and communicates nothing must call it.
void check_place(const std::string& group);

TP_EXT_API int64_t size(const std::string& group);  // 1 for ""
TP_EXT_API int64_t rank(const std::string& group);  // 0 for ""

// The result of a collective in flight. wait() returns the result; a Pending that is dropped, by an
// exception for example, waits too, since the communication still writes to its buffer. It lives
// and dies inside one function, but for the prefetched weights of autograd/weight_gather.cpp.
class Pending {
 public:
  Pending() = default;
  Pending(at::Tensor result, c10::intrusive_ptr<c10::intrusive_ptr_target> work,
          std::function<at::Tensor(const at::Tensor&)> finish = nullptr);
  Pending(Pending&&) = default;
  Pending& operator=(Pending&&) = delete;
  ~Pending();
  at::Tensor wait();

 private:
  at::Tensor result_;
  c10::intrusive_ptr<c10::intrusive_ptr_target> work_;
  std::function<at::Tensor(const at::Tensor&)> finish_;
};

// The order of a sum over the ranks: the backend's, or the binary tree of shm/tree_sum_op.h
enum class Order { kAny, kTree };

// Whether the backend adds x of all ranks in that tree
bool adds_in_a_tree(const at::Tensor& x, const std::string& group);

// Sum over the ranks. The second and third take ownership of `fresh`, a tensor that the caller has
// just allocated.
at::Tensor all_reduce(const at::Tensor& x, const std::string& group);
at::Tensor all_reduce_fresh(const at::Tensor& fresh, const std::string& group);
Pending all_reduce_async(const at::Tensor& fresh, const std::string& group,
                         Order order = Order::kAny);

// Gives each row of the sum of x over the ranks to `end`, in their order, and writes the sum
// nowhere. False if this backend cannot; nothing has been communicated then. To the other ranks it
// is an all-reduce, so that they need not do the same.
bool all_reduce_rows(const at::Tensor& x, const std::string& group, const RowEnd& end);

// Maximum over the ranks; owns `fresh`, as above
at::Tensor all_reduce_max(const at::Tensor& fresh, const std::string& group);

// Concatenation along dim; `split` gives the ranks' lengths
at::Tensor all_gather(const at::Tensor& x, const std::string& group, int64_t dim,
                      const Split& split);
Pending all_gather_async(const at::Tensor& x, const std::string& group, int64_t dim,
                         const Split& split);

// [p, *x.shape], x of the same shape on all ranks
at::Tensor all_gather_stack(const at::Tensor& x, const std::string& group);

// This rank's slice along dim of the sum over the ranks. The second and third own `fresh`, as
// above.
at::Tensor reduce_scatter(const at::Tensor& x, const std::string& group, int64_t dim,
                          const Split& split);
at::Tensor reduce_scatter_fresh(const at::Tensor& fresh, const std::string& group, int64_t dim,
                                const Split& split);
Pending reduce_scatter_async(const at::Tensor& fresh, const std::string& group, int64_t dim,
                             const Split& split, Order order = Order::kAny);

// Slice k of split_dim goes to rank k; the slice from rank k is block k of concat_dim
at::Tensor all_to_all(const at::Tensor& x, const std::string& group, int64_t split_dim,
                      int64_t concat_dim, const Split& split, const Split& concat);
Pending all_to_all_async(const at::Tensor& x, const std::string& group, int64_t split_dim,
                         int64_t concat_dim, const Split& split, const Split& concat);

}  // namespace tp_ext::comm
