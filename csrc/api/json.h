// As much of JSON as the heads of safetensors files and their indices are.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace tp_ext::json {

// A string, an integer, an array or an object; the others are read and dropped
struct Value {
  enum Kind { kOther, kString, kInteger, kArray, kObject } kind = kOther;
  std::string text;
  int64_t number = 0;
  std::vector<Value> items;
  std::map<std::string, Value> members;

  // Raise ValueError where this is of another kind, or has no such member
  const std::string& string() const;
  int64_t integer() const;
  std::vector<int64_t> integers() const;
  const Value& at(const std::string& name) const;
};

// Raises ValueError for text that is no JSON
Value parse(std::string_view text);

std::string quoted(const std::string& text);

}  // namespace tp_ext::json
