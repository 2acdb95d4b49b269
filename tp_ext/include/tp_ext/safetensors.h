// Full models in safetensors files.

#pragma once

#include <torch/nn/module.h>
#include <string>

#include "tp_ext/export.h"

namespace tp_ext {

/// Loads full tensors, of which each rank reads its own slices, by the names of the parameters and
/// buffers. path: a file, or a folder with model.safetensors or model.safetensors.index.json.
///
/// Communicates: one number over each group: all ranks load, or none. Errors: c10::ValueError, on
/// all ranks, for a file that cannot be read or is damaged, names that are missing or unexpected,
/// and shapes that differ; nothing has changed then.
TP_EXT_API void load_safetensors(const std::string& path, torch::nn::Module& module);

/// Writes the unsharded model to one file, or to model.safetensors in a folder. All ranks call it,
/// rank 0 writes and renames the file when it is complete.
///
/// Communicates: an all-gather of each sharded tensor. Errors: c10::ValueError, on all ranks, if
/// rank 0 cannot write.
TP_EXT_API void save_safetensors(const std::string& path, const torch::nn::Module& module);

}  // namespace tp_ext
