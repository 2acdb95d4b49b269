// How the kernels of a family are launched: as was measured to be fastest on this architecture, or,
// without an entry in the table, by the rule in the header of the kernels. Host code without torch.
//
// [Note: a table may make kernels slow but not wrong] An entry is for all widths of
// (2^(w - 1), 2^w]; a choice that does not fit a width falls back to the rule.

#pragma once

#include <cstdint>
#include <iterator>
#include <string_view>

namespace tp_ext {

enum class Family {
  kRmsNormBackward,
  kLayerNormBackward,
  kCeStats,
  kCeBackward,
  kColumnsForward,
  kColumnsBackward,
  kDropoutForward,
  kDropoutBackward,
  kEmbeddingBackward,
  kRmsNormForward,
  kLayerNormForward,
  kRope,
  kRandomFill
};
constexpr std::string_view kFamilies[] = {
    "rms_norm_bwd",   "layer_norm_bwd", "ce_stats",    "ce_bwd",        "columns_fwd",
    "columns_bwd",    "dropout_fwd",    "dropout_bwd", "embedding_bwd", "rms_norm_fwd",
    "layer_norm_fwd", "rope",           "random_fill"};

// 0: as the rule has it
struct LaunchChoice {
  int vectors = 0;  // that a thread has at once: of its row (norms), of as many rows (the others)
  int threads = 0;  // of a row (cross entropy)
  int rows = 0;     // of a block (cross entropy)
  int blocks = 0;   // of a multiprocessor (norms), of the grid (columns)
  int stages = 0;   // 2: the next row is loaded while one is computed (norms), 1: it is not
};

struct LaunchEntry {
  Family family;
  int bytes, width, arch;  // of an element; exponent of the widest row; 90 for sm_90
  LaunchChoice choice;
};

constexpr LaunchEntry kLaunchTable[] = {
#include "kernels/launch_table.inc"
    {Family::kColumnsForward, 0, 0, 0, {}},  // matches nothing: a table has an entry
};

constexpr int width_class(int64_t width) {
  int exponent = 0;
  while (exponent < 62 && (int64_t{1} << exponent) < width) ++exponent;
  return exponent;
}

// What `make gpu-tune` measures at the moment, instead of the table
struct LaunchTrial {
  bool active = false;
  LaunchChoice choice;
};
// Visible: the library and the Python module share it
inline __attribute__((visibility("default"))) LaunchTrial launch_trials[std::size(kFamilies)];

inline LaunchChoice choose_launch(Family family, int bytes, int64_t width, int arch) {
  const LaunchTrial& trial = launch_trials[static_cast<int>(family)];
  if (trial.active) return trial.choice;
  for (const LaunchEntry& entry : kLaunchTable) {
    if (entry.family == family && entry.bytes == bytes && entry.width == width_class(width) &&
        entry.arch == arch)
      return entry.choice;
  }
  return {};
}

}  // namespace tp_ext
