#include "api/json.h"

#include <c10/util/Exception.h>

#include <cctype>
#include <cstdlib>

namespace tp_ext::json {
namespace {

constexpr int kMaxDepth = 64;

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Value whole() {
    Value value = next(0);
    space();
    check(at_ == text_.size());
    return value;
  }

 private:
  void check(bool right) const { TORCH_CHECK_VALUE(right, "no JSON, at character ", at_); }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void space() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  void expect(char c) {
    space();
    check(peek() == c && at_ < text_.size());
    ++at_;
  }
  bool take(char c) {
    space();
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  Value next(int depth) {
    check(depth < kMaxDepth);
    space();
    Value value;
    if (peek() == '"') {
      value.kind = Value::kString;
      value.text = string();
    } else if (take('[')) {
      value.kind = Value::kArray;
      if (take(']')) return value;
      do value.items.push_back(next(depth + 1));
      while (take(','));
      expect(']');
    } else if (take('{')) {
      value.kind = Value::kObject;
      if (take('}')) return value;
      do {
        space();
        std::string name = string();
        expect(':');
        check(value.members.emplace(std::move(name), next(depth + 1)).second);
      } while (take(','));
      expect('}');
    } else {
      word(value);
    }
    return value;
  }

  // A number, true, false or null
  void word(Value& value) {
    const size_t start = at_;
    while (std::isalnum(static_cast<unsigned char>(peek())) || peek() == '-' || peek() == '+' ||
           peek() == '.')
      ++at_;
    const std::string text(text_.substr(start, at_ - start));
    check(!text.empty());
    if (text == "true" || text == "false" || text == "null") return;
    char* end = nullptr;
    value.number = std::strtoll(text.c_str(), &end, 10);
    if (*end == '\0') {
      value.kind = Value::kInteger;
    } else {
      std::strtod(text.c_str(), &end);
      check(*end == '\0');
    }
  }

  std::string string() {
    expect('"');
    std::string result;
    while (peek() != '"') {
      check(at_ < text_.size());
      char c = text_[at_++];
      if (c == '\\') {
        c = peek();
        ++at_;
        if (c == 'u') {
          append_code(result);
          continue;
        }
        const auto known = std::string_view("nrtbf").find(c);
        if (known != std::string_view::npos) c = "\n\r\t\b\f"[known];
      }
      result += c;
    }
    ++at_;
    return result;
  }

  uint32_t code() {
    check(at_ + 4 <= text_.size());
    const std::string digits(text_.substr(at_, 4));
    at_ += 4;
    char* end = nullptr;
    const auto value = static_cast<uint32_t>(std::strtoul(digits.c_str(), &end, 16));
    check(*end == '\0');
    return value;
  }

  void append_code(std::string& to) {  // as UTF-8
    uint32_t c = code();
    if (c >= 0xD800 && c < 0xDC00 && text_.substr(at_, 2) == "\\u") {
      at_ += 2;
      c = 0x10000 + ((c - 0xD800) << 10) + (code() - 0xDC00);
    }
    const auto put = [&](uint32_t byte) { to += static_cast<char>(byte); };
    if (c < 0x80) return put(c);
    if (c < 0x800) {
      put(0xC0 | c >> 6);
    } else if (c < 0x10000) {
      put(0xE0 | c >> 12);
      put(0x80 | (c >> 6 & 0x3F));
    } else {
      put(0xF0 | c >> 18);
      put(0x80 | (c >> 12 & 0x3F));
      put(0x80 | (c >> 6 & 0x3F));
    }
    put(0x80 | (c & 0x3F));
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

const std::string& Value::string() const {
  TORCH_CHECK_VALUE(kind == kString, "a value that must be a string");
  return text;
}

int64_t Value::integer() const {
  TORCH_CHECK_VALUE(kind == kInteger, "a value that must be an integer");
  return number;
}

std::vector<int64_t> Value::integers() const {
  TORCH_CHECK_VALUE(kind == kArray, "a value that must be a list of integers");
  std::vector<int64_t> result;
  for (const Value& item : items) result.push_back(item.integer());
  return result;
}

const Value& Value::at(const std::string& name) const {
  const auto found = members.find(name);
  TORCH_CHECK_VALUE(kind == kObject && found != members.end(), "no '", name, "'");
  return found->second;
}

Value parse(std::string_view text) { return Parser(text).whole(); }

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + '"';
}

}  // namespace tp_ext::json
