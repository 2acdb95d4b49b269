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

template <typename Class>
void add_fields(Class& /*unused*/) {}

template <typename Class, typename Field, typename... Others>
void add_fields(Class& bound, const char* name, Field field, Others... others) {
  bound.def_readwrite(name, field);
  add_fields(bound, others...);
}

// A struct whose constructor takes the fields by name.
template <typename Struct, typename... Fields>
py::class_<Struct> bind_fields(py::module_& m, const char* name, Fields... fields) {
  py::class_<Struct> bound(m, name);
  bound.def(py::init([](const py::kwargs& values) {
    auto result = std::make_unique<Struct>();
    const py::object view = py::cast(result.get(), py::return_value_policy::reference);
    for (const auto& [field, value] : values) py::setattr(view, field, value);
    return std::move(*result);
  }));
  add_fields(bound, fields...);
  return bound;
}

void bind_values(py::module_& m) {
  bind_fields<Curve>(m, "Curve", "share", &Curve::share, "tile_m", &Curve::tile_m, "tile_n",
                     &Curve::tile_n, "units", &Curve::units, "half_k", &Curve::half_k, "table",
                     &Curve::table)
      .def("at", &Curve::at);
  bind_fields<Level>(m, "Level", "latency", &Level::latency, "bandwidth", &Level::bandwidth,
                     "devices", &Level::devices);
  bind_fields<Machine>(m, "Machine", "peak_blocks", &Machine::peak_blocks, "peak_other",
                       &Machine::peak_other, "blocks", &Machine::blocks, "other", &Machine::other,
                       "attention", &Machine::attention, "memory_bandwidth",
                       &Machine::memory_bandwidth, "optimizer_bandwidth",
                       &Machine::optimizer_bandwidth, "asynchronous", &Machine::asynchronous,
                       "memory", &Machine::memory, "launch", &Machine::launch, "gather",
                       &Machine::gather, "count", &Machine::count, "levels", &Machine::levels);
  py::enum_<OpKind>(m, "OpKind")
      .value("column", OpKind::Column)
      .value("row", OpKind::Row)
      .value("replicated", OpKind::Replicated)
      .value("attention", OpKind::Attention)
      .value("pointwise", OpKind::Pointwise)
      .value("dispatch", OpKind::Dispatch)
      .value("embedding", OpKind::Embedding)
      .value("loss", OpKind::Loss);
  bind_fields<Op>(m, "Op", "kind", &Op::kind, "inputs", &Op::inputs, "outputs", &Op::outputs,
                  "units", &Op::units, "bias", &Op::bias, "heads", &Op::heads, "kv_heads",
                  &Op::kv_heads, "key_features", &Op::key_features, "value_features",
                  &Op::value_features, "fused", &Op::fused, "causal", &Op::causal, "moved_forward",
                  &Op::moved_forward, "moved_backward", &Op::moved_backward, "saved", &Op::saved,
                  "saved_bytes", &Op::saved_bytes, "sharded", &Op::sharded, "vectors", &Op::vectors,
                  "experts", &Op::experts, "top_k", &Op::top_k, "low_precision",
                  &Op::low_precision);
  bind_fields<BlockOps>(m, "BlockOps", "layers", &BlockOps::layers, "ops", &BlockOps::ops);
  bind_fields<Workload>(m, "Workload", "hidden", &Workload::hidden, "seq", &Workload::seq, "heads",
                        &Workload::heads, "kv_heads", &Workload::kv_heads, "experts",
                        &Workload::experts, "layers", &Workload::layers, "vocab", &Workload::vocab,
                        "tied", &Workload::tied, "first", &Workload::first, "last", &Workload::last,
                        "blocks", &Workload::blocks);
}

void bind_layouts(py::module_& m) {
  py::enum_<Recompute>(m, "Recompute")
      .value("none", Recompute::None)
      .value("selective", Recompute::Selective)
      .value("full", Recompute::Full)
      .value("attention", Recompute::Attention)
      .value("half", Recompute::Half);
  bind_fields<Layout>(
      m, "Layout", "pp", &Layout::pp, "dp", &Layout::dp, "ep", &Layout::ep, "cp", &Layout::cp, "tp",
      &Layout::tp, "virtual", &Layout::virtual_stages, "schedule", &Layout::schedule, "micro_batch",
      &Layout::micro_batch, "zero", &Layout::zero, "sequence_parallel", &Layout::sequence_parallel,
      "offload", &Layout::offload, "overlap_tp", &Layout::overlap_tp, "recompute",
      &Layout::recompute, "element", &Layout::element, "quantized", &Layout::quantized,
      "param_bytes", &Layout::param_bytes, "grad_bytes", &Layout::grad_bytes, "state_bytes",
      &Layout::state_bytes, "shares", &Layout::shares, "cut", &Layout::cut);
  bind_fields<Space>(m, "Space", "pp", &Space::pp, "dp", &Space::dp, "ep", &Space::ep, "cp",
                     &Space::cp, "tp", &Space::tp, "micro_batch", &Space::micro_batch, "zero",
                     &Space::zero, "schedules", &Space::schedules, "recompute", &Space::recompute,
                     "sequence_parallel", &Space::sequence_parallel, "offload", &Space::offload,
                     "overlap_tp", &Space::overlap_tp, "base", &Space::base);
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
