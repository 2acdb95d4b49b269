// The name of a group, as operators get it; the only C++ file that takes it apart:
//
//   name                                                   of a process group; "" is no group
//   name@rank/size                                         spares the lookup of rank and size
//   name@rank/size/one_shot_bytes/max_bytes/buffer/fused   asks for symmetric memory
//
// tp_ext/group.py and tp_ext/symmetric_memory.py write it.

#pragma once

#include <c10/util/Exception.h>

#include <charconv>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

namespace tp_ext::comm {

// Name, rank and size. Every collective parses them: copies nothing.
struct GroupName {
  std::string_view name;
  int64_t rank = -1, size = -1;  // -1: not given

  explicit GroupName(const std::string& group) : name(group) {
    const auto at = name.rfind('@');
    if (at == std::string_view::npos) return;
    const char *place = group.data() + at + 1, *const end = group.data() + group.size();
    const auto after_rank = std::from_chars(place, end, rank);
    TORCH_CHECK_VALUE(after_rank.ptr < end && *after_rank.ptr == '/', "group: '", group,
                      "' must be a name, or name@rank/size");
    std::from_chars(after_rank.ptr + 1, end, size);
    name = name.substr(0, at);
  }
};

// All fields of a name that asks for symmetric memory
struct SymmetricGroup {
  std::string name;
  int64_t rank, size;
  int64_t one_shot_bytes, max_bytes;  // largest tensors summed by one_shot, and at all
  uint64_t buffer;                    // number of torch's persistent allocation
  bool fused;                         // whether GEMMs are fused with collectives
};

inline std::optional<SymmetricGroup> symmetric_group(const std::string& group) {
  const auto at = group.rfind('@');
  if (at == std::string::npos) return std::nullopt;
  uint64_t numbers[6];
  const char* text = group.c_str() + at;  // each number follows an '@' or a '/'
  for (auto& number : numbers) {
    if (*text != (text == group.c_str() + at ? '@' : '/')) return std::nullopt;
    char* end = nullptr;
    number = std::strtoull(text + 1, &end, 10);
    text = end;
  }
  return SymmetricGroup{group.substr(0, at),
                        static_cast<int64_t>(numbers[0]),
                        static_cast<int64_t>(numbers[1]),
                        static_cast<int64_t>(numbers[2]),
                        static_cast<int64_t>(numbers[3]),
                        numbers[4],
                        numbers[5] != 0};
}

}  // namespace tp_ext::comm
