// Launches a family of kernels otherwise than the table says, for `make gpu-tune`.

#pragma once

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <string>

#include "kernels/launch_table.h"

namespace tp_ext {

// nullopt: by the table again. False: no such family.
inline bool try_launch(const std::string& family, const std::optional<std::array<int, 5>>& choice) {
  const auto at = std::find(std::begin(kFamilies), std::end(kFamilies), family);
  if (at == std::end(kFamilies)) return false;
  LaunchTrial& trial = launch_trials[at - std::begin(kFamilies)];
  trial = {choice.has_value(), {}};
  if (choice) trial.choice = {(*choice)[0], (*choice)[1], (*choice)[2], (*choice)[3], (*choice)[4]};
  return true;
}

}  // namespace tp_ext
