// The operators that Python calls without boxing.

#include "python/direct_call.h"

#include <map>

#include "operators.h"

namespace tp_ext {
namespace {

using Make = PyObject* (*)(const char* name, PyObject* overload);

#define TP_DIRECT(name) \
  { #name, direct_call < decltype(name)> }

const std::map<std::string, Make>& table() {
  static const std::map<std::string, Make> makers = {
      TP_DIRECT(copy_to_region),
      TP_DIRECT(reduce_from_region),
      TP_DIRECT(scatter_to_region),
      TP_DIRECT(gather_from_region),
      TP_DIRECT(all_gather_region),
      TP_DIRECT(reduce_scatter_region),
      TP_DIRECT(column_parallel_linear),
      TP_DIRECT(row_parallel_linear),
      TP_DIRECT(bias_act),
      TP_DIRECT(gated_act),
      TP_DIRECT(rms_norm),
      TP_DIRECT(rms_norm_residual),
      TP_DIRECT(all_reduce_rms_norm),
      TP_DIRECT(layer_norm),
      TP_DIRECT(layer_norm_residual),
      TP_DIRECT(rope),
      TP_DIRECT(attention),
      TP_DIRECT(bias_dropout_residual),
      TP_DIRECT(vocab_parallel_embedding),
      TP_DIRECT(vocab_parallel_argmax),
      TP_DIRECT(vocab_parallel_sample),
      TP_DIRECT(moe_permute),
      TP_DIRECT(moe_unpermute),
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
