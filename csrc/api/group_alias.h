// A second name of a process group, by which the graph of an exported model finds it.

#pragma once

#include <string>

#include "tp_ext/group.h"

namespace tp_ext {

// Registered while it lives. Raises ValueError for a name that is in use.
class GroupAlias {
 public:
  GroupAlias(std::string name, const Group& group);
  GroupAlias(const GroupAlias&) = delete;
  GroupAlias& operator=(const GroupAlias&) = delete;
  ~GroupAlias();

 private:
  std::string name_;
};

}  // namespace tp_ext
