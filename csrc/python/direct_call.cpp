// The operators that Python calls without boxing, each with the signature of its implementation.

#include "python/direct_call.h"

#include <map>

namespace tp_ext {
namespace {

using c10::SymInt;
using Make = PyObject* (*)(const char* name, PyObject* overload);

using Region = Tensor(const Tensor&, const std::string&);
using DimRegion = Tensor(const Tensor&, const std::string&, int64_t, Sizes);
template <typename... Options>
using Linear = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const std::string&, bool,
                      Sizes, const OptionalTensor&, int64_t, Options...);
using ParallelMlp = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           const Tensor&, const std::string&, bool, Sizes, const OptionalTensor&,
                           const OptionalTensor&, bool);
using Activation = Tensor(const Tensor&, const OptionalTensor&, std::string_view);
using RmsNorm = Tensor(const Tensor&, const OptionalTensor&, double);
using LayerNorm = Tensor(const Tensor&, const OptionalTensor&, const OptionalTensor&, double);
using Rope = Tensor(const Tensor&, const Tensor&, const Tensor&, bool, const OptionalTensor&);
using BiasDropoutResidual = Tensor(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                   const Tensor&, double, SymInt, SymInt, SymInt);
using Embedding = Tensor(const Tensor&, const Tensor&, const std::string&, SymInt, SymInt, SymInt,
                         bool, Sizes);

const std::map<std::string, Make>& table() {
  static const std::map<std::string, Make> makers = {
      {"copy_to_region", direct_call<Region>},
      {"reduce_from_region", direct_call<Region>},
      {"scatter_to_region", direct_call<DimRegion>},
      {"gather_from_region", direct_call<DimRegion>},
      {"all_gather_region", direct_call<DimRegion>},
      {"reduce_scatter_region", direct_call<DimRegion>},
      {"column_parallel_linear", direct_call<Linear<>>},
      {"row_parallel_linear", direct_call<Linear<bool>>},
      {"parallel_mlp", direct_call<ParallelMlp>},
      {"bias_act", direct_call<Activation>},
      {"gated_act", direct_call<Activation>},
      {"rms_norm", direct_call<RmsNorm>},
      {"layer_norm", direct_call<LayerNorm>},
      {"rope", direct_call<Rope>},
      {"bias_dropout_residual", direct_call<BiasDropoutResidual>},
      {"vocab_parallel_embedding", direct_call<Embedding>},
  };
  return makers;
}

}  // namespace

PyObject* direct_call(const std::string& name, PyObject* overload) {
  const auto found = table().find(name);
  TORCH_CHECK_VALUE(found != table().end(), "name: '", name, "' must be an operator of the table");
  return found->second(found->first.c_str(), overload);
}

}  // namespace tp_ext
