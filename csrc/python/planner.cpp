// The planner as a submodule of the extension module: values in and out as they are in C++.

#include "python/planner.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "planner/search.h"
#include "planner/split.h"

namespace py = pybind11;

namespace tp_ext::planner {
namespace {

using Actions = std::vector<std::vector<std::tuple<int, int32_t, int32_t>>>;

std::shared_ptr<Schedule> make_schedule(const Actions& lists, int32_t microbatches) {
  std::vector<std::vector<Action>> actions;
  for (const auto& list : lists) {
    actions.emplace_back();
    for (const auto& [kind, stage, microbatch] : list)
      actions.back().push_back({static_cast<Kind>(kind), stage, microbatch});
  }
  return std::make_shared<Schedule>(std::move(actions), microbatches);
}

py::tuple run(const Schedule& schedule,
              const std::vector<std::tuple<double, double, double>>& times, double send) {
  std::vector<StageTimes> stages;
  for (const auto& [forward, input_grad, weight_grad] : times)
    stages.push_back({forward, input_grad, weight_grad});
  const Step step = simulate(schedule, stages, send, true);
  py::list events;
  for (const auto& of_rank : step.events) {
    py::list rows;
    for (const Event& event : of_rank)
      rows.append(py::make_tuple(static_cast<int>(event.action.kind), event.action.stage,
                                 event.action.microbatch, event.start, event.end));
    events.append(rows);
  }
  return py::make_tuple(step.time, step.busy, events);
}

const char* name_of(Axis axis) {
  static const std::array<const char*, 5> names = {"tp", "cp", "ep", "dp", "pp"};
  return names[static_cast<size_t>(axis)];
}

const char* name_of(Collective kind) {
  static const std::array<const char*, 7> names = {
      "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv"};
  return names[static_cast<size_t>(kind)];
}

py::list rows_of(const Prediction& prediction) {
  py::list ranks;
  for (const auto& of_rank : prediction.traffic) {
    py::list rows;
    for (const Traffic& row : of_rank)
      rows.append(py::make_tuple(name_of(row.axis), name_of(row.kind), row.size, row.number,
                                 row.payload, row.number * row.payload,
                                 row.number * wire_bytes(row.kind, row.size, row.payload), row.time,
                                 row.exposed));
    ranks.append(rows);
  }
  return ranks;
}

py::list memory_of(const Prediction& prediction) {
  py::list ranks;
  for (const auto& of_stage : prediction.memory) {
    py::list rows;
    for (const Memory& one : of_stage)
      rows.append(py::make_tuple(one.parameters, one.gradients, one.states, one.activations,
                                 one.buffers, one.logits, one.peak));
    ranks.append(rows);
  }
  return ranks;
}

py::dict breakdown_of(const Prediction& prediction) {
  const Breakdown& one = prediction.breakdown;
  py::dict result;
  result["gemm"] = one.work.gemm;
  result["attention"] = one.work.attention;
  result["memory_bound"] = one.work.memory;
  result["tp"] = one.work.tp;
  result["cp"] = one.work.cp;
  result["ep"] = one.work.ep;
  result["pp"] = one.pp;
  result["dp"] = one.dp;
  result["bubble"] = one.bubble;
  result["optimizer"] = one.optimizer;
  result["host"] = one.work.host;
  return result;
}

py::list stages_of(const Prediction& prediction) {
  py::list stages;
  for (const StageTimes& one : prediction.stages)
    stages.append(py::make_tuple(one.forward, one.input_grad, one.weight_grad));
  return stages;
}

void bind_values(py::module_& m) {
  py::class_<Curve>(m, "Curve")
      .def(py::init<>())
      .def_readwrite("share", &Curve::share)
      .def_readwrite("tile_m", &Curve::tile_m)
      .def_readwrite("tile_n", &Curve::tile_n)
      .def_readwrite("units", &Curve::units)
      .def_readwrite("half_k", &Curve::half_k)
      .def_readwrite("table", &Curve::table)
      .def("at", &Curve::at);
  py::class_<Level>(m, "Level").def(py::init([](double latency, double bandwidth, int64_t devices) {
    return Level{latency, bandwidth, devices};
  }));
  py::class_<Machine>(m, "Machine")
      .def(py::init<>())
      .def_readwrite("peak_blocks", &Machine::peak_blocks)
      .def_readwrite("peak_other", &Machine::peak_other)
      .def_readwrite("blocks", &Machine::blocks)
      .def_readwrite("other", &Machine::other)
      .def_readwrite("attention", &Machine::attention)
      .def_readwrite("memory_bandwidth", &Machine::memory_bandwidth)
      .def_readwrite("optimizer_bandwidth", &Machine::optimizer_bandwidth)
      .def_readwrite("asynchronous", &Machine::asynchronous)
      .def_readwrite("memory", &Machine::memory)
      .def_readwrite("launch", &Machine::launch)
      .def_readwrite("gather", &Machine::gather)
      .def_readwrite("count", &Machine::count)
      .def_readwrite("levels", &Machine::levels);
  py::enum_<OpKind>(m, "OpKind")
      .value("column", OpKind::Column)
      .value("row", OpKind::Row)
      .value("replicated", OpKind::Replicated)
      .value("attention", OpKind::Attention)
      .value("pointwise", OpKind::Pointwise)
      .value("dispatch", OpKind::Dispatch)
      .value("embedding", OpKind::Embedding)
      .value("loss", OpKind::Loss);
  py::class_<Op>(m, "Op")
      .def(py::init<>())
      .def_readwrite("kind", &Op::kind)
      .def_readwrite("inputs", &Op::inputs)
      .def_readwrite("outputs", &Op::outputs)
      .def_readwrite("units", &Op::units)
      .def_readwrite("bias", &Op::bias)
      .def_readwrite("heads", &Op::heads)
      .def_readwrite("kv_heads", &Op::kv_heads)
      .def_readwrite("key_features", &Op::key_features)
      .def_readwrite("value_features", &Op::value_features)
      .def_readwrite("fused", &Op::fused)
      .def_readwrite("causal", &Op::causal)
      .def_readwrite("moved_forward", &Op::moved_forward)
      .def_readwrite("moved_backward", &Op::moved_backward)
      .def_readwrite("saved", &Op::saved)
      .def_readwrite("saved_bytes", &Op::saved_bytes)
      .def_readwrite("sharded", &Op::sharded)
      .def_readwrite("vectors", &Op::vectors)
      .def_readwrite("experts", &Op::experts)
      .def_readwrite("top_k", &Op::top_k)
      .def_readwrite("low_precision", &Op::low_precision);
  py::class_<BlockOps>(m, "BlockOps").def(py::init([](int64_t layers, std::vector<Op> ops) {
    return BlockOps{layers, std::move(ops)};
  }));
  py::class_<Workload>(m, "Workload")
      .def(py::init<>())
      .def_readwrite("hidden", &Workload::hidden)
      .def_readwrite("seq", &Workload::seq)
      .def_readwrite("heads", &Workload::heads)
      .def_readwrite("kv_heads", &Workload::kv_heads)
      .def_readwrite("experts", &Workload::experts)
      .def_readwrite("layers", &Workload::layers)
      .def_readwrite("vocab", &Workload::vocab)
      .def_readwrite("tied", &Workload::tied)
      .def_readwrite("first", &Workload::first)
      .def_readwrite("last", &Workload::last)
      .def_readwrite("blocks", &Workload::blocks);
}

void bind_layouts(py::module_& m) {
  py::enum_<Recompute>(m, "Recompute")
      .value("none", Recompute::None)
      .value("selective", Recompute::Selective)
      .value("full", Recompute::Full)
      .value("attention", Recompute::Attention)
      .value("half", Recompute::Half);
  py::class_<Layout>(m, "Layout")
      .def(py::init<>())
      .def_readwrite("pp", &Layout::pp)
      .def_readwrite("dp", &Layout::dp)
      .def_readwrite("ep", &Layout::ep)
      .def_readwrite("cp", &Layout::cp)
      .def_readwrite("tp", &Layout::tp)
      .def_readwrite("virtual", &Layout::virtual_stages)
      .def_readwrite("schedule", &Layout::schedule)
      .def_readwrite("micro_batch", &Layout::micro_batch)
      .def_readwrite("zero", &Layout::zero)
      .def_readwrite("sequence_parallel", &Layout::sequence_parallel)
      .def_readwrite("offload", &Layout::offload)
      .def_readwrite("overlap_tp", &Layout::overlap_tp)
      .def_readwrite("recompute", &Layout::recompute)
      .def_readwrite("element", &Layout::element)
      .def_readwrite("quantized", &Layout::quantized)
      .def_readwrite("param_bytes", &Layout::param_bytes)
      .def_readwrite("grad_bytes", &Layout::grad_bytes)
      .def_readwrite("state_bytes", &Layout::state_bytes)
      .def_readwrite("shares", &Layout::shares)
      .def_readwrite("cut", &Layout::cut);
  py::class_<Space>(m, "Space")
      .def(py::init<>())
      .def_readwrite("pp", &Space::pp)
      .def_readwrite("dp", &Space::dp)
      .def_readwrite("ep", &Space::ep)
      .def_readwrite("cp", &Space::cp)
      .def_readwrite("tp", &Space::tp)
      .def_readwrite("micro_batch", &Space::micro_batch)
      .def_readwrite("zero", &Space::zero)
      .def_readwrite("schedules", &Space::schedules)
      .def_readwrite("recompute", &Space::recompute)
      .def_readwrite("sequence_parallel", &Space::sequence_parallel)
      .def_readwrite("offload", &Space::offload)
      .def_readwrite("overlap_tp", &Space::overlap_tp)
      .def_readwrite("base", &Space::base);
  py::class_<Rejected>(m, "Rejected")
      .def_readonly("layout", &Rejected::layout)
      .def_readonly("peak", &Rejected::peak)
      .def_readonly("rank", &Rejected::rank);
  py::class_<Found>(m, "Found")
      .def_readonly("best", &Found::best)
      .def_readonly("rejected", &Found::rejected)
      .def_readonly("count", &Found::count);
}

}  // namespace

void bind(py::module_& parent) {
  py::module_ m = parent.def_submodule("planner", "The simulator of training steps.");
  py::class_<Schedule, std::shared_ptr<Schedule>>(m, "Schedule")
      .def(py::init(&make_schedule))
      .def_readonly("in_flight", &Schedule::in_flight);
  m.def("simulate", &run);
  m.def("split_blocks", &split_blocks);
  bind_values(m);
  bind_layouts(m);
  py::class_<Prediction>(m, "Prediction")
      .def_readonly("layout", &Prediction::layout)
      .def_readonly("step_time", &Prediction::step_time)
      .def_readonly("send", &Prediction::send)
      .def_property_readonly("breakdown", &breakdown_of)
      .def_property_readonly("collectives", &rows_of)
      .def_property_readonly("memory", &memory_of)
      .def_property_readonly("stages", &stages_of);
  py::class_<Planner>(m, "Planner")
      .def(py::init<Workload, std::vector<Machine>, int64_t, Schedules>())
      .def("predict", &Planner::predict)
      .def("bound", &Planner::bound);
  m.def("legal_layouts", &legal_layouts);
  m.def("search", &search);
}

}  // namespace tp_ext::planner
