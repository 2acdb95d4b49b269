// The options in the name of a group with symmetric memory, as tp_ext/symmetric_memory.py writes
// them: one_shot_bytes/max_bytes/buffer/fused.

#pragma once

#include "comm/group_name.h"

namespace tp_ext::comm {

struct SymmetricGroup {
  std::string name;  // of the process group
  int64_t size;
  int64_t one_shot_bytes, max_bytes;  // largest tensors summed by one_shot, and at all
  uint64_t buffer;                    // number of torch's persistent allocation
  bool fused;                         // whether GEMMs are fused with collectives
};

inline std::optional<SymmetricGroup> symmetric_group(const std::string& group) {
  const GroupName key(group);
  const char *text = key.options.data(), *const end = text + key.options.size();
  uint64_t numbers[4];
  for (auto& number : numbers) {
    const auto [next, error] = std::from_chars(text, end, number);
    if (error != std::errc()) return std::nullopt;
    text = next < end ? next + 1 : end;
  }
  return SymmetricGroup{std::string(key.name),
                        key.size,
                        static_cast<int64_t>(numbers[0]),
                        static_cast<int64_t>(numbers[1]),
                        numbers[2],
                        numbers[3] != 0};
}

}  // namespace tp_ext::comm
