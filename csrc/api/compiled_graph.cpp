#include "api/compiled_graph.h"

#include <c10/util/Exception.h>
#include <torch/custom_class.h>

#include <utility>

namespace tp_ext {

CompiledGraph::CompiledGraph(const std::string& library)
    : runner_(library, /*num_models=*/1, /*run_single_threaded=*/true) {}

std::vector<std::string> CompiledGraph::weight_names() const {
  std::vector<std::string> names;
  for (const auto& [constant, name] : runner_.getConstantNamesToOriginalFQNs())
    names.push_back(name);
  return names;
}

void CompiledGraph::load_weights(std::unordered_map<std::string, at::Tensor> weights) {
  weights_ = std::move(weights);
  torch::inductor::TensorConstantMap constants;
  for (const auto& [constant, name] : runner_.getConstantNamesToOriginalFQNs()) {
    const auto weight = weights_.find(name);
    TORCH_CHECK_VALUE(weight != weights_.end(), "weights: '", name, "' is missing");
    constants.emplace(constant, &weight->second);
  }
  runner_.update_constant_buffer(constants, /*use_inactive=*/false, /*validate_full_updates=*/true,
                                 /*user_managed=*/true);
}

namespace {

// The same for Python. torch's own binding holds the interpreter's lock while the graph runs, and
// waits forever where a thread of gloo needs it to free the tensors of an earlier collective;
// methods of torch.classes run without it.
struct GraphOfPython : torch::CustomClassHolder {
  explicit GraphOfPython(const std::string& library) : graph(library) {}

  void load_weights(const c10::Dict<std::string, at::Tensor>& named) {
    std::unordered_map<std::string, at::Tensor> weights;
    for (const auto& entry : named) weights.emplace(entry.key(), entry.value());
    graph.load_weights(std::move(weights));
  }

  CompiledGraph graph;
};

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  m.class_<GraphOfPython>("CompiledGraph")
      .def(torch::init<std::string>())
      .def("weight_names",
           [](const c10::intrusive_ptr<GraphOfPython>& self) { return self->graph.weight_names(); })
      .def("load_weights", &GraphOfPython::load_weights)
      .def("run", [](const c10::intrusive_ptr<GraphOfPython>& self,
                     const std::vector<at::Tensor>& inputs) { return self->graph.run(inputs); });
}

}  // namespace
}  // namespace tp_ext
