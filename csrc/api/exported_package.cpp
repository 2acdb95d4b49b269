// A package of AOTInductor, for Python. torch's own binding holds the interpreter's lock while the
// package runs, and waits forever where a thread of gloo needs it to free the tensors of an earlier
// collective; methods of torch.classes run without it.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace tp_ext {
namespace {

class ExportedPackage : public torch::CustomClassHolder {
 public:
  explicit ExportedPackage(const std::string& path)
      : loader_(path, "model", /*run_single_threaded=*/true) {}

  std::vector<std::string> weight_names() { return loader_.get_constant_fqns(); }

  // Reads the weights where they are, as long as it lives
  void load_weights(const c10::Dict<std::string, at::Tensor>& weights) {
    for (const auto& entry : weights) weights_.emplace(entry.key(), entry.value());
    loader_.load_constants(weights_, /*use_inactive=*/false, /*check_full_update=*/true,
                           /*user_managed=*/true);
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) { return loader_.run(inputs); }

 private:
  std::unordered_map<std::string, at::Tensor> weights_;
  torch::inductor::AOTIModelPackageLoader loader_;  // ends before the weights
};

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  m.class_<ExportedPackage>("ExportedPackage")
      .def(torch::init<std::string>())
      .def("weight_names", &ExportedPackage::weight_names)
      .def("load_weights", &ExportedPackage::load_weights)
      .def("run", &ExportedPackage::run);
}

}  // namespace
}  // namespace tp_ext
