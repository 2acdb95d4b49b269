// What one block of a model, or what is before or after the blocks, costs one rank for one
// microbatch: seconds by cause, saved bytes, parameters, collectives.

#pragma once

#include <array>
#include <vector>

#include "planner/machine.h"
#include "planner/workload.h"

namespace tp_ext::planner {

enum class Axis : uint8_t { Tp, Cp, Ep, Dp, Pp };

// Collectives of one payload along one axis
struct Traffic {
  Axis axis;
  Collective kind;
  int64_t size;
  double number, payload;
  double time, exposed;  // of all of them
};

struct Seconds {
  double gemm = 0, attention = 0, memory = 0, tp = 0, cp = 0, ep = 0, host = 0;

  double total() const { return gemm + attention + memory + tp + cp + ep + host; }
  Seconds& operator+=(const Seconds& other);
  Seconds operator*(double factor) const;
};

// Of one microbatch
struct Costs {
  Seconds forward, input_grad, weight_grad;
  double saved = 0;               // bytes from forward to backward
  double recomputed = 0;          // bytes that exist only in a backward that recomputes them
  double logits = 0;              // bytes of the loss
  double dense = 0, experts = 0;  // parameters of the rank
  double routers = 0;             // of the dense ones those of routers
  double tensors = 0;             // number of tensors of parameters

  void add(const Costs& other, double times);
  double backward() const { return input_grad.total() + weight_grad.total(); }
};

struct Layer : Costs {
  std::vector<Traffic> traffic;
};

// Adds the numbers of calls of the same axis, kind, size and payload
void add_traffic(std::vector<Traffic>& rows, const Traffic& row, double times = 1);

// `accumulates`: a step has several microbatches
Layer price(const std::vector<Op>& ops, bool is_block, bool accumulates, const Workload& workload,
            const Layout& layout, const Machine& machine);

// The heads of the rank
struct Heads {
  int64_t query, key;
};
Heads heads_of(int64_t heads, int64_t kv_heads, const Layout& layout);

inline int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

}  // namespace tp_ext::planner
