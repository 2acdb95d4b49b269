// Models that tp_ext.export_model wrote, without Python.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tp_ext/export.h"
#include "tp_ext/group.h"

namespace tp_ext {

/// Options of ExportedModel::generate.
struct GenerateOptions {
  int64_t max_new_tokens = 64;
  double temperature = 0;  ///< 0: the most likely token; else as of vocab_parallel_sample
  std::optional<int64_t> top_k = {};  ///< as of vocab_parallel_sample
  std::optional<double> top_p = {};   ///< as of vocab_parallel_sample
  int64_t seed = 0;                   ///< given to manual_seed before the first token
  std::vector<int64_t> stop = {};     ///< ids after which no token is appended
};

/// This rank's part of an exported model. It can be moved, not copied; the group must outlive it.
class TP_EXT_API ExportedModel {
 public:
  /// Loads the files of a folder; all ranks of the group call this. Communicates: two numbers of
  /// each rank, whether it can load and which export it has.
  ///
  /// Errors (c10::ValueError, on all ranks): another number of ranks, another torch, a processor
  /// without the features of the one that exported, a file that was changed, other exports.
  explicit ExportedModel(const std::string& folder, const Group& group = Group());
  ExportedModel(ExportedModel&&) noexcept;
  ExportedModel& operator=(ExportedModel&&) noexcept;
  ~ExportedModel();

  /// The outputs, for inputs in the order of the manifest. Errors: c10::ValueError for inputs of
  /// other dtypes or shapes, before any communication.
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& inputs);

  /// The prompt [batch, n], int64, with up to max_new_tokens ids appended, the same ones on every
  /// rank and those of Python's ExportedModel.generate. `callback` gets each new id, with batch 1,
  /// and ends the text by returning false. Errors: c10::ValueError for an export without
  /// generate=True, more than max_seq tokens, or options as of vocab_parallel_sample.
  at::Tensor generate(const at::Tensor& prompt, const GenerateOptions& options = {},
                      const std::function<bool(int64_t)>& callback = {});

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace tp_ext
