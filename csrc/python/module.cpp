// The Python extension module. Importing it loads the operators. It also exports the build's
// options, size and rank of a group by its name, the collective counters, functions that call
// operators without boxing, the shared-memory backend, that of simulated ranks, Newton-Schulz, and
// the planner.

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <array>
#include <optional>
#include <string>

#include "api/sharding.h"
#include "autograd/blocks.h"
#include "autograd/weight_gather.h"
#include "comm/collectives.h"
#include "comm/counter.h"
#include "launch_trial.h"
#include "memory/keep_memory.h"
#include "optim/newton_schulz.h"
#include "products.h"
#include "python/planner.h"
#include "shm/backend.h"
#include "simulate/backend.h"

#define TP_EXT_BUILT_FOR "tp_ext built for torch "

namespace tp_ext {
namespace {
// tp_ext/_build.py looks for it in the file, before it loads a library that another torch may crash
[[gnu::used]] const char kBuiltFor[] = TP_EXT_BUILT_FOR TORCH_VERSION;
}  // namespace

PyObject* direct_call(const std::string& name, PyObject* overload);
}  // namespace tp_ext

PYBIND11_MODULE(_C, m) {
  m.doc() = "Operators of tp_ext (torch.ops.tp_ext) and how they were built.";
  m.def("build_info", [] {
    pybind11::dict info;
    info["torch"] = tp_ext::kBuiltFor + sizeof(TP_EXT_BUILT_FOR) - 1;
#ifdef TP_EXT_WITH_CUDA
    info["cuda"] = TP_EXT_CUDA_VERSION;
    info["cuda_archs"] = TP_EXT_CUDA_ARCHS;
#else
    info["cuda"] = pybind11::none();
    info["cuda_archs"] = "";
#endif
    info["compiler"] = __VERSION__;
    return info;
  });
  m.def("group_size", &tp_ext::comm::size);
  m.def("group_rank", &tp_ext::comm::rank);
  m.def("create_shm_backend", &tp_ext::shm::create_backend,
        pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("cpu_products", &tp_ext::products::describe);
  m.def("products_are_strict", &tp_ext::products::are_strict);
  m.def("direct_call", [](const std::string& name, const pybind11::object& overload) {
    return pybind11::reinterpret_steal<pybind11::object>(tp_ext::direct_call(name, overload.ptr()));
  });
  m.def("open_counter", &tp_ext::comm::open_counter);
  m.def("close_counter", &tp_ext::comm::close_counter);
  const auto rows = [](const std::vector<tp_ext::comm::CollectiveCount>& counts) {
    pybind11::list rows;
    for (const auto& c : counts)
      rows.append(
          pybind11::make_tuple(c.group, c.group_size, c.kind, c.full, c.own, c.number, c.op));
    return rows;
  };
  m.def("read_counter", [rows](int64_t id) { return rows(tp_ext::comm::read_counter(id)); });
  m.def("read_calls", [rows](int64_t id) { return rows(tp_ext::comm::read_calls(id)); });
  using tp_ext::GatherOrder;
  pybind11::class_<GatherOrder, GatherOrder::Ptr>(m, "GatherOrder")
      .def(pybind11::init<>())
      .def("begin", &GatherOrder::begin, pybind11::call_guard<pybind11::gil_scoped_release>())
      .def("end", &GatherOrder::end, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("gathers_ahead", &GatherOrder::is_running);
  m.def("keep_memory", &tp_ext::memory::keep);
  m.def("keeps_memory", &tp_ext::memory::keeps);
  m.def("kept_bytes", &tp_ext::memory::kept_bytes);
  m.def("try_launch", [](const std::string& family, std::optional<std::array<int, 5>> choice) {
    if (!tp_ext::try_launch(family, choice))
      throw pybind11::value_error("family: '" + family + "' is not in csrc/kernels/launch_table.h");
  });
  m.def("orthogonalized", &tp_ext::orthogonalized,
        pybind11::call_guard<pybind11::gil_scoped_release>());
  // For a comparison with Python's: [Note: the rule of shards in C++]
  m.def("span",
        [](int64_t size, int64_t unit, int64_t copies, int64_t groups, int64_t rank, int64_t p) {
          return tp_ext::nn::span({size, unit, copies, groups}, {"", rank, p});
        });
  m.def("head_parts", [](int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t p) {
    const auto [q, kv] = tp_ext::nn::head_parts(num_heads, num_kv_heads, head_dim, p);
    const auto numbers = [](const tp_ext::Part& part) {
      return std::array{part.size, part.unit, part.copies, part.groups};
    };
    return std::pair{numbers(q), numbers(kv)};
  });
  m.def("vocab_columns",
        [](int64_t width, std::optional<int64_t> vocab_size, int64_t rank, int64_t p) {
          const auto columns = tp_ext::nn::vocab_columns(width, vocab_size, {"", rank, p});
          return std::array{columns.start, columns.local, columns.full};
        });
  tp_ext::simulate::bind(m);
  tp_ext::planner::bind(m);
}
