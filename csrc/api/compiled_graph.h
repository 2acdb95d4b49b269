// A graph that AOTInductor compiled, run from where its files are.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace tp_ext {

// [Note: compiled graphs are loaded in place]
// torch's loader of packages unpacks them into a temporary folder, which a killed process leaves.
class CompiledGraph {
 public:
  // The shared library of the graph; the operators that it calls are in a .json next to it.
  explicit CompiledGraph(const std::string& library);

  std::vector<std::string> weight_names() const;

  // Reads the weights where they are, as long as it lives. Raises ValueError if one is missing.
  void load_weights(std::unordered_map<std::string, at::Tensor> weights);

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) { return runner_.run(inputs); }

 private:
  std::unordered_map<std::string, at::Tensor> weights_;
  torch::inductor::AOTIModelContainerRunnerCpu runner_;  // ends before the weights
};

}  // namespace tp_ext
