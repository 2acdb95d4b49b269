// The name of a group, as operators get it; the only C++ file that takes it apart:
//
//   name             of a process group; "" is no group
//   name@rank/size   spares the lookup of rank and size
//
// tp_ext/group.py writes it.

#pragma once

#include <c10/util/Exception.h>

#include <charconv>
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

}  // namespace tp_ext::comm
