#include "json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <version>
#if !defined(__cpp_lib_to_chars) && !defined(__wasm__)
#include <locale>
#include <sstream>
#endif

#include "fail.h"

#if defined(__wasm__)  // JavaScript's Number(text): less code than a library's function, and as exact
extern "C" __attribute__((import_module("unflip"), import_name("number"))) double unflip_js_number(const char* text, size_t size);
#endif

namespace unflip {
namespace {

constexpr int kMaxDepth = 16;             // a graph needs 6
constexpr size_t kMaxValues = 4'000'000;  // 100,000 ops of 40 values each

class Parser {
 public:
  Parser(std::string_view text, const std::string& what, const std::string& hint) : text_(text), what_(what), hint_(hint) {}

  Json document() {
    Json value = element(0);
    space();
    if (at_ != text_.size()) fail("more text after the end of the JSON");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    unflip::fail(what_ + "bad JSON at byte " + std::to_string(at_) + ": " + what + hint_);
  }

  bool more() const { return at_ < text_.size(); }
  char peek() const { return more() ? text_[at_] : '\0'; }

  void space() {
    while (more() && (peek() == ' ' || peek() == '\t' || peek() == '\n' || peek() == '\r')) ++at_;
  }

  bool take(char wanted) {
    space();
    if (!more() || peek() != wanted) return false;
    ++at_;
    return true;
  }

  void expect(char wanted) {
    if (!take(wanted)) fail(std::string("expected '") + wanted + "'");
  }

  Json element(int depth) {
    if (depth > kMaxDepth) fail("nested more than " + std::to_string(kMaxDepth) + " deep");
    if (++values_ > kMaxValues) fail("more than " + std::to_string(kMaxValues) + " values");
    space();
    if (!more()) fail("it ends where a value was expected");
    Json value;
    value.begin = at_;
    switch (peek()) {
      case '{': object(value, depth); break;
      case '[': array(value, depth); break;
      case '"':
        value.type = Json::Type::String;
        value.string = string();
        break;
      case 't': word("true", value, Json::Type::Bool, true); break;
      case 'f': word("false", value, Json::Type::Bool, false); break;
      case 'n': word("null", value, Json::Type::Null, false); break;
      default: number(value);
    }
    value.end = at_;
    return value;
  }

  void word(std::string_view expected, Json& value, Json::Type type, bool boolean) {
    if (text_.substr(at_, expected.size()) != expected) fail("expected a value");
    at_ += expected.size();
    value.type = type;
    value.boolean = boolean;
  }

  void array(Json& value, int depth) {
    value.type = Json::Type::Array;
    expect('[');
    if (take(']')) return;
    do {
      value.items.push_back(element(depth + 1));
    } while (take(','));
    expect(']');
  }

  void object(Json& value, int depth) {
    value.type = Json::Type::Object;
    expect('{');
    if (take('}')) return;
    do {
      space();
      if (peek() != '"') fail("expected a key in quotes");
      value.keys.push_back(string());
      expect(':');
      value.items.push_back(element(depth + 1));
    } while (take(','));
    expect('}');
    refuse_duplicates(value.keys);
  }

  void refuse_duplicates(const std::vector<std::string>& keys) const {
    std::vector<std::string_view> sorted(keys.begin(), keys.end());
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) fail("the key \"" + std::string(twice->substr(0, 100)) + "\" occurs twice");
  }

  void digits() {
    if (peek() < '0' || peek() > '9') fail("expected a value");
    while (peek() >= '0' && peek() <= '9') ++at_;
  }

  void number(Json& value) {
    const size_t begin = at_;
    if (peek() == '-') ++at_;
    if (peek() == '0') {
      ++at_;
    } else {
      digits();
    }
    const size_t whole = at_;
    if (peek() == '.') {
      ++at_;
      digits();
    }
    if (peek() == 'e' || peek() == 'E') {
      ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      digits();
    }
    value.type = Json::Type::Number;
    value.whole = at_ == whole;
    value.number = convert(text_.substr(begin, at_ - begin));
  }

  // Not strtod: it reads "0.5" as 0 if the program's locale uses a decimal comma.
  double convert(std::string_view digits) const {
    double result = 0;
#if defined(__wasm__)
    result = unflip_js_number(digits.data(), digits.size());
    const bool fits = true;
#elif defined(__cpp_lib_to_chars)
    const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), result);
    const bool fits = read.ec == std::errc();
#else
    std::istringstream stream{std::string(digits)};
    stream.imbue(std::locale::classic());
    const bool fits = static_cast<bool>(stream >> result);
#endif
    if (!fits || !std::isfinite(result)) fail("a number out of range");
    return result;
  }

  std::string string() {
    expect('"');
    std::string result;
    for (;;) {
      if (!more()) fail("a string without an end");
      const unsigned char c = static_cast<unsigned char>(text_[at_]);
      if (c == '"') {
        ++at_;
        return result;
      }
      if (c < 0x20) fail("a control character in a string");
      if (c == '\\') {
        escape(result);
      } else if (c < 0x80) {
        result.push_back(text_[at_++]);
      } else {
        utf8(result);
      }
    }
  }

  void escape(std::string& result) {
    ++at_;
    const char c = peek();
    static constexpr std::string_view kFrom = "\"\\/bfnrt", kTo = "\"\\/\b\f\n\r\t";
    if (c == 'u') {
      ++at_;
      append(result, code_point());
      return;
    }
    const size_t which = more() ? kFrom.find(c) : std::string_view::npos;
    if (which == std::string_view::npos) fail("an unknown escape in a string");
    result.push_back(kTo[which]);
    ++at_;
  }

  uint32_t hex4() {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char c = peek();
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) fail("expected four hex digits after \\u");
      value = value * 16 + static_cast<uint32_t>(digit);
    }
    return value;
  }

  uint32_t code_point() {
    const uint32_t first = hex4();
    if (first < 0xD800 || first > 0xDFFF) return first;
    if (first > 0xDBFF || text_.substr(at_, 2) != "\\u") fail("half of a surrogate pair");
    at_ += 2;
    const uint32_t second = hex4();
    if (second < 0xDC00 || second > 0xDFFF) fail("half of a surrogate pair");
    return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
  }

  static void append(std::string& result, uint32_t code) {
    const auto tail = [&](int shift) { result.push_back(static_cast<char>(0x80 | ((code >> shift) & 0x3F))); };
    if (code < 0x80) {
      result.push_back(static_cast<char>(code));
    } else if (code < 0x800) {
      result.push_back(static_cast<char>(0xC0 | (code >> 6)));
      tail(0);
    } else if (code < 0x10000) {
      result.push_back(static_cast<char>(0xE0 | (code >> 12)));
      tail(6), tail(0);
    } else {
      result.push_back(static_cast<char>(0xF0 | (code >> 18)));
      tail(12), tail(6), tail(0);
    }
  }

  // One character of two to four bytes: not overlong, not half of a surrogate pair.
  void utf8(std::string& result) {
    const unsigned char lead = static_cast<unsigned char>(text_[at_]);
    const int length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC2 || lead > 0xF4 || text_.size() - at_ < static_cast<size_t>(length)) fail("a string that is not UTF-8");
    uint32_t code = lead & (0x7Fu >> length);
    for (int i = 1; i < length; ++i) {
      const unsigned char next = static_cast<unsigned char>(text_[at_ + static_cast<size_t>(i)]);
      if ((next & 0xC0) != 0x80) fail("a string that is not UTF-8");
      code = (code << 6) | (next & 0x3Fu);
    }
    static constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
    if (code < kLeast[length] || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) fail("a string that is not UTF-8");
    result.append(text_.substr(at_, static_cast<size_t>(length)));
    at_ += static_cast<size_t>(length);
  }

  std::string_view text_;
  const std::string &what_, &hint_;
  size_t at_ = 0;
  size_t values_ = 0;
};

}  // namespace

const Json* Json::find(std::string_view key) const {
  for (size_t i = 0; i < keys.size(); ++i)
    if (keys[i] == key) return &items[i];
  return nullptr;
}

int64_t json_memory(std::string_view text) {
  // Every value except the first follows one of these, and every key precedes a colon. Vectors and strings that grow have their
  // old and their doubled memory at the same time.
  const auto separators = std::count_if(text.begin(), text.end(), [](char c) { return c == '[' || c == '{' || c == ','; });
  const auto keys = std::count(text.begin(), text.end(), ':');
  const int64_t each = sizeof(Json) * (separators + 1) + (sizeof(std::string) + sizeof(std::string_view)) * keys;
  return 3 * (each + static_cast<int64_t>(text.size()));
}

Json parse_json(std::string_view text, const std::string& what, const std::string& hint) {
  return Parser(text, what, hint).document();
}

const char* type_name(Json::Type type) {
  switch (type) {
    case Json::Type::Null: return "null";
    case Json::Type::Bool: return "a boolean";
    case Json::Type::Number: return "a number";
    case Json::Type::String: return "a string";
    case Json::Type::Array: return "a list";
    case Json::Type::Object: return "an object";
  }
  return "unknown";
}

std::string shown(std::string_view text, const Json& value) {
  constexpr size_t kMost = 60;
  std::string_view raw = text.substr(value.begin, value.end - value.begin);
  if (raw.size() <= kMost) return std::string(raw);
  size_t cut = kMost;  // not within a character
  while (cut > 0 && (static_cast<unsigned char>(raw[cut]) & 0xC0) == 0x80) --cut;
  return std::string(raw.substr(0, cut)) + "...";
}

}  // namespace unflip
