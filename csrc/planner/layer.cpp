#include "planner/layer.h"

#include <algorithm>
#include <cmath>

namespace tp_ext::planner {
namespace {

// [Note: Python on a CPU]: times the host's time for the forward, of selective recomputation, whose
// operators torch dispatches in Python, twice
constexpr double kSelective = 15;

// Prices the operators of one layer, in their order
class Pricing {
 public:
  Pricing(bool is_block, bool accumulates, const Workload& workload, const Layout& layout,
          const Machine& machine)
      : workload_(workload), layout_(layout), machine_(machine), accumulates_(accumulates) {
    tokens_ = double(divide_up(layout.micro_batch * workload.seq, layout.cp));
    split_ = layout.tp > 1 && layout.sequence_parallel;
    own_ = split_ ? double(layout.share(int64_t(tokens_))) : tokens_;
    gathered_ = split_ ? double(layout.longest(int64_t(tokens_)) * layout.tp) : tokens_;
    recompute_ = is_block ? layout.recompute : Recompute::None;
  }

  Layer result(const std::vector<Op>& ops) {
    for (const Op& op : ops) add(op);
    finish();
    return std::move(layer_);
  }

 private:
  void add(const Op& op) {
    switch (op.kind) {
      case OpKind::Column:
      case OpKind::Row:
      case OpKind::Replicated:
        return linear(op);
      case OpKind::Attention:
        return attention(op);
      case OpKind::Pointwise:
        return pointwise(op);
      case OpKind::Dispatch:
        return dispatch(op);
      case OpKind::Embedding:
        return embedding(op);
      case OpKind::Loss:
        return loss(op);
    }
  }

  void kernel(Seconds& seconds, double Seconds::*part, double time) const {
    seconds.*part += time;
    seconds.host += machine_.host(time);
  }
  double lasting(double time) const { return time + machine_.host(time); }
  void memory(Seconds& seconds, double bytes) const {
    if (bytes > 0) kernel(seconds, &Seconds::memory, bytes / machine_.memory_bandwidth);
  }

  // Counts calls of one kind; `hidden` is the computation during which each of them runs
  void call(Seconds& seconds, Axis axis, Collective kind, Group group, double payload,
            double hidden = 0, double number = 1) {
    if (group.size <= 1 || payload <= 0) return;
    const double time = axis == Axis::Cp ? machine_.message(group.stride, payload)
                                         : machine_.collective(kind, group, payload);
    const double exposed = number * machine_.shown(time, hidden);
    const Traffic row{axis, kind, group.size, number, payload, number * time, exposed};
    add_traffic(layer_.traffic, row);
    if (&seconds == &layer_.forward) forward_traffic_.push_back(row);
    (axis == Axis::Tp ? seconds.tp : axis == Axis::Cp ? seconds.cp : seconds.ep) += exposed;
  }
  void tp_call(Seconds& seconds, Collective kind, double payload, double gemm = 0,
               bool overlaps = false) {
    const Group group{layout_.tp, 1};
    double hidden = overlaps ? gemm : 0;
    if (layout_.overlap_tp && !overlaps) {
      // Chunk by chunk next to its GEMM: the first chunk, or the last one, has none
      const double time = machine_.collective(kind, group, payload);
      hidden = std::min(gemm, time) * (1 - 1 / double(layout_.tp));
    }
    call(seconds, Axis::Tp, kind, group, payload, hidden);
  }

  void linear(const Op& op) {
    const bool column = op.kind == OpKind::Column, replicated = op.kind == OpKind::Replicated;
    const double element = layout_.element;
    double in = op.inputs, out = op.outputs;
    double& sharded = column ? out : in;
    if (op.heads) {  // q, k and v of one linear
      const Heads own = heads_of(op.heads, op.kv_heads, layout_);
      out = double(own.query + own.key) * op.key_features + double(own.key) * op.value_features;
    } else if (!replicated) {
      sharded *= sharded_part(op);
    }
    const int64_t experts = op.experts ? divide_up(op.experts, layout_.ep) : 1;
    double rows = replicated ? own_ : tokens_;
    if (op.experts) rows = rows * double(op.top_k) / double(experts);  // of each of them
    const double times = double(experts);

    double weights = times * in * out;
    if (op.bias) weights += times * (column ? out : op.outputs);
    (op.experts ? layer_.experts : layer_.dense) += weights;
    if (op.outputs > 0) layer_.tensors += op.bias ? 2 : 1;
    if (replicated && int64_t(op.outputs) == workload_.experts) layer_.routers += weights;

    const bool low = op.low_precision;
    const double moved = element * (rows * (in + out) + in * out);
    const double forward = times * machine_.gemm(rows, out, in, low, moved);
    const double input_grad = times * machine_.gemm(rows, in, out, low, moved);
    // Gradients add up over microbatches: parameters of less bytes have theirs in main_grad, to
    // which the GEMM adds; otherwise autograd adds them in a pass
    const bool fused = layout_.param_bytes < layout_.grad_bytes;
    const double sums = accumulates_ && fused ? 2 * layout_.grad_bytes * in * out : 0;
    const double weight_grad = times * machine_.gemm(in, out, rows, low, moved + sums);
    kernel(layer_.forward, &Seconds::gemm, forward);
    kernel(layer_.input_grad, &Seconds::gemm, input_grad);
    kernel(layer_.weight_grad, &Seconds::gemm, weight_grad);
    if (accumulates_ && !fused) memory(layer_.weight_grad, 3 * layout_.grad_bytes * weights);
    if (low && layout_.quantized) {  // weights are cast once in a step
      memory(layer_.forward, (element + 1) * times * rows * in);
      memory(layer_.input_grad, (element + 1) * times * rows * out);
    }
    if (layout_.param_bytes > element)
      memory(layer_.forward, (layout_.param_bytes + element) * weights);
    forward_gemm_ += forward;

    const double copies = op.experts ? double(op.top_k) : 1;
    layer_.saved += op.saved * element * (op.sharded ? tokens_ : own_) * copies;
    kept_ += element * times * rows * out;  // the result of the product
    if (replicated) {
      if (split_) tp_call(layer_.weight_grad, Collective::AllReduce, weights * element);
    } else if (!op.experts) {
      communicate(op, column, lasting(forward), lasting(input_grad), lasting(weight_grad));
    }
  }

  // docs/reference/communication.md, the rows of ColumnParallelLinear and RowParallelLinear
  void communicate(const Op& op, bool column, double forward, double input_grad,
                   double weight_grad) {
    const double features = column ? op.inputs : op.outputs;
    const double payload = gathered_ * features * layout_.element;
    if (column) {
      if (split_) {
        tp_call(layer_.forward, Collective::AllGather, payload, forward);
        kept_ += payload;
        if (op.outputs > 0)
          tp_call(layer_.input_grad, Collective::AllGather, payload, input_grad, true);
        tp_call(layer_.input_grad, Collective::ReduceScatter, payload, weight_grad, true);
      } else {
        tp_call(layer_.input_grad, Collective::AllReduce, payload, weight_grad, true);
      }
    } else {
      tp_call(layer_.forward, split_ ? Collective::ReduceScatter : Collective::AllReduce, payload,
              forward);
      if (layout_.tp > 1) kept_ += own_ * features * layout_.element;
      if (split_) {
        tp_call(layer_.input_grad, Collective::AllGather, payload, input_grad);
        if (op.bias) tp_call(layer_.weight_grad, Collective::AllReduce, features * layout_.element);
      }
    }
    if (op.heads && op.kv_heads < layout_.tp) {  // copies of k and v: their gradients are summed
      const double rows = double(op.kv_heads) * (op.key_features + op.value_features);
      tp_call(layer_.weight_grad, Collective::AllReduce, rows * op.inputs * layout_.element);
      if (op.bias) tp_call(layer_.weight_grad, Collective::AllReduce, rows * layout_.element);
    }
  }

  void attention(const Op& op) {
    const double element = layout_.element;
    const Heads own = heads_of(op.heads, op.kv_heads, layout_);
    const double keys = double(workload_.seq), heads = double(own.query);
    const double features = op.key_features + op.value_features;
    const double seen = op.causal && op.fused ? 0.5 : 1;  // a materialised mask saves nothing
    const double flops = 2 * tokens_ * keys * seen * heads * features;
    const double speed = machine_.peak_other * machine_.attention;
    Seconds forward;
    if (op.fused) {
      kernel(forward, &Seconds::attention, flops / speed);
      // Flash attention's backward has five products for two, at about 0.8 of the forward's speed
      kernel(layer_.input_grad, &Seconds::attention, 2.5 / 0.8 * flops / speed);
    } else {
      const double products = machine_.gemm(tokens_, keys, op.key_features, false, 0) +
                              machine_.gemm(tokens_, op.value_features, keys, false, 0);
      kernel(forward, &Seconds::attention, heads * products);
      kernel(layer_.input_grad, &Seconds::attention, 2 * heads * products);
      // Scale, mask and softmax in one pass, dropout in one: of each score read and write
      const double scores = tokens_ * heads * keys;
      memory(forward, scores * (4 * element + 1));
      memory(layer_.input_grad, scores * (5 * element + 1));
    }
    layer_.forward += forward;
    attention_forward_ += forward;

    const double values =
        (heads + double(own.key)) * op.key_features + double(own.key) * op.value_features;
    // q, k and v are parts of one product: their gradients are joined
    memory(layer_.input_grad, 2 * tokens_ * values * element);
    const double output = tokens_ * heads * op.value_features * element;
    scores_ += op.fused ? 0 : 5 * tokens_ * heads * keys;
    layer_.saved += tokens_ * values * element + output;
    layer_.saved += op.fused ? 4 * tokens_ * heads : 5 * tokens_ * heads * keys;
    kept_attention_ += output + (op.fused ? 4 * tokens_ * heads : 0);

    // The ring: cp - 1 exchanges of a block of k and v, during the attention to the last one
    const Group ring{layout_.cp, layout_.tp};
    const double block = tokens_ * double(own.key) * features * element;
    const double rounds = double(layout_.cp - 1),
                 part = lasting(forward.attention) / double(layout_.cp);
    call(layer_.forward, Axis::Cp, Collective::AllToAll, ring, block, part, rounds);
    call(layer_.input_grad, Axis::Cp, Collective::AllToAll, ring, block, part, 2 * rounds);
  }

  double sharded_part(const Op& op) const {
    return double(layout_.share(op.units)) / double(op.units);
  }

  void pointwise(const Op& op) {
    const double part = op.sharded ? sharded_part(op) : 1;
    double tokens = op.sharded ? tokens_ : own_;
    if (op.top_k) tokens *= double(op.top_k);
    Seconds forward;
    memory(forward, tokens * part * op.moved_forward * layout_.element);
    layer_.forward += forward;
    pointwise_forward_ += forward;
    memory(layer_.input_grad, tokens * part * op.moved_backward * layout_.element);
    layer_.saved += tokens * (part * op.saved * layout_.element + op.saved_bytes);
    if (op.heads) {                                                                // a rotation
      layer_.saved += 4 * tokens / double(layout_.micro_batch) * op.key_features;  // its tables
      // The ring has k and v as one tensor, and q is a part of q and k as they were rotated: k twice
      const double keys = double(heads_of(op.heads, op.kv_heads, layout_).key);
      if (layout_.cp > 1) layer_.saved += tokens * keys * op.key_features * layout_.element;
    }
    layer_.dense += double(op.vectors) * op.inputs;
    layer_.tensors += double(op.vectors);
    for (int64_t i = 0; split_ && i < op.vectors; ++i)
      tp_call(layer_.weight_grad, Collective::AllReduce, op.inputs * layout_.element);
  }

  // docs/reference/communication.md, ParallelMoE: over ep two exchanges, over tp as a row linear
  void dispatch(const Op& op) {
    const double element = layout_.element, copies = double(op.top_k);
    const Group experts{layout_.ep, layout_.tp * layout_.cp};
    Seconds &forward = layer_.forward, &backward = layer_.input_grad;
    if (layout_.ep > 1) {
      const double payload = tokens_ * copies * op.inputs * element;
      call(forward, Axis::Ep, Collective::AllGather, experts,
           8.0 * double(op.experts * layout_.ep));
      call(forward, Axis::Ep, Collective::AllToAll, experts, payload, 0, 2);
      call(backward, Axis::Ep, Collective::AllToAll, experts, payload, 0, 2);
    }
    const double payload = gathered_ * op.inputs * element, weights = gathered_ * copies;
    // Probabilities in fp32 and choices of own tokens; slots and weights of all, under SP with the
    // choices, since they are gathered together
    layer_.saved += own_ * (4 * double(op.experts) + 12 * copies + 4);
    layer_.saved += tokens_ * (layout_.sequence_parallel ? 16 : 12) * copies;
    const auto sum = [&](Collective kind) {
      const size_t before = forward_traffic_.size();
      const double exposed = forward.tp;
      tp_call(forward, kind, payload);
      // Backward needs nothing of it: checkpoints stop computing again before it
      forward_traffic_.resize(before);
      once_ += forward.tp - exposed;
    };
    if (split_) {
      tp_call(forward, Collective::AllGather, payload);
      tp_call(forward, Collective::AllGather, 8 * weights);
      sum(Collective::ReduceScatter);
      tp_call(backward, Collective::ReduceScatter, payload);
      tp_call(backward, Collective::ReduceScatter, 8 * weights);
      tp_call(backward, Collective::AllGather, payload);
    } else {
      sum(Collective::AllReduce);
      tp_call(backward, Collective::AllReduce, payload);
      tp_call(backward, Collective::AllReduce, 4 * weights);
    }
  }

  void embedding(const Op& op) {
    layer_.dense += op.inputs * sharded_part(op) * op.outputs;
    ++layer_.tensors;
    layer_.saved += 8 * tokens_;  // the ids
    const double payload = gathered_ * op.outputs * layout_.element;
    memory(layer_.forward, 2 * tokens_ * op.outputs * layout_.element);
    memory(layer_.weight_grad, 3 * tokens_ * op.outputs * layout_.element);
    tp_call(layer_.forward, split_ ? Collective::ReduceScatter : Collective::AllReduce, payload);
    if (split_) tp_call(layer_.weight_grad, Collective::AllGather, payload);
  }

  void loss(const Op& op) {
    const double columns = op.inputs * sharded_part(op);
    const double logits = tokens_ * columns * layout_.element;
    memory(layer_.forward, logits);
    memory(layer_.input_grad, 2 * logits);
    // The logits with four numbers a row; in backward their gradient. Under autocast torch's loss has
    // a copy in fp32 and the gradient of that, too
    const bool autocast = layout_.param_bytes > layout_.element;
    layer_.logits += 2 * logits + 16 * tokens_ + (autocast ? 8 * tokens_ * columns : 0);
    tp_call(layer_.forward, Collective::AllGather, 16 * (tokens_ + 1) * double(layout_.tp));
  }

  void finish() {
    if (recompute_ == Recompute::None) return;
    const double input = own_ * workload_.hidden * layout_.element;
    const double all = layer_.saved;
    Seconds again = pointwise_forward_;
    switch (recompute_) {
      case Recompute::Full:
        again = layer_.forward;
        again.tp -= once_;
        layer_.saved = input;
        for (const Traffic& row : forward_traffic_) add_traffic(layer_.traffic, row);
        break;
      case Recompute::Selective:
        if (!machine_.asynchronous) again.host += kSelective * layer_.forward.host;
        layer_.saved = std::min(all, input + kept_attention_ + kept_);
        break;
      case Recompute::Half:  // of the results of products every second one
        again.gemm += forward_gemm_ / 2;
        layer_.saved = std::min(all, input + kept_attention_ + kept_ / 2);
        break;
      default:
        again = attention_forward_;
        layer_.saved -= scores_;
    }
    layer_.recomputed = all - layer_.saved;
    layer_.input_grad += again;
  }

  const Workload& workload_;
  const Layout& layout_;
  const Machine& machine_;
  const bool accumulates_;
  Recompute recompute_;
  bool split_;
  double tokens_, own_, gathered_;  // of the tp group, of this rank, padded ones of the group
  double kept_ = 0, kept_attention_ = 0, scores_ = 0, forward_gemm_ = 0;
  double once_ = 0;  // exposed seconds of what a recomputation leaves out
  Seconds pointwise_forward_, attention_forward_;
  std::vector<Traffic> forward_traffic_;
  Layer layer_;
};

}  // namespace

Seconds& Seconds::operator+=(const Seconds& other) {
  gemm += other.gemm;
  attention += other.attention;
  memory += other.memory;
  tp += other.tp;
  cp += other.cp;
  ep += other.ep;
  host += other.host;
  return *this;
}

Seconds Seconds::operator*(double factor) const {
  return {gemm * factor, attention * factor, memory * factor, tp * factor,
          cp * factor,   ep * factor,        host * factor};
}

void Costs::add(const Costs& other, double times) {
  forward += other.forward * times;
  input_grad += other.input_grad * times;
  weight_grad += other.weight_grad * times;
  saved += other.saved * times;
  recomputed = std::max(recomputed, other.recomputed);
  logits += other.logits * times;
  dense += other.dense * times;
  experts += other.experts * times;
  routers += other.routers * times;
  tensors += other.tensors * times;
}

void add_traffic(std::vector<Traffic>& rows, const Traffic& row, double times) {
  for (Traffic& one : rows)
    if (one.axis == row.axis && one.kind == row.kind && one.size == row.size &&
        one.payload == row.payload) {
      one.number += row.number * times;
      one.time += row.time * times;
      one.exposed += row.exposed * times;
      return;
    }
  Traffic added = row;
  added.number *= times;
  added.time *= times;
  added.exposed *= times;
  rows.push_back(added);
}

// tp_ext/sharding.py, head_parts: a group of queries with its key is not cut; with fewer keys than
// ranks each rank has one key and a part of its queries
Heads heads_of(int64_t heads, int64_t kv_heads, const Layout& layout) {
  const int64_t tp = layout.tp;
  if (!heads) return {0, 0};
  if (kv_heads >= tp || layout.cut) {
    const int64_t keys = layout.share(kv_heads);
    return {keys * (heads / kv_heads), keys};
  }
  return {divide_up(heads / kv_heads, divide_up(tp, kv_heads)), 1};
}

Layer price(const std::vector<Op>& ops, bool is_block, bool accumulates, const Workload& workload,
            const Layout& layout, const Machine& machine) {
  return Pricing(is_block, accumulates, workload, layout, machine).result(ops);
}

}  // namespace tp_ext::planner
