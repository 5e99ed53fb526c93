// A small strict JSON reader for untrusted files: RFC 8259 without duplicate keys. Depth and number of values are limited, so
// that a small file cannot become a large tree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace unflip {

struct Json {
  enum class Type { Null, Bool, Number, String, Array, Object };

  Type type = Type::Null;
  bool boolean = false;
  double number = 0;
  bool whole = false;  // a number without fraction and exponent. Python reads others, such as 2.0, as floats
  std::string string;
  std::vector<Json> items;        // the items of an array, or the values of an object
  std::vector<std::string> keys;  // the keys of an object, one per item
  size_t begin = 0, end = 0;      // its position in the text

  const Json* find(std::string_view key) const;  // in an object; null if the key is missing
};

// Fails with the problem and its byte position. `what` and `hint` come before and after it in the message.
Json parse_json(std::string_view text, const std::string& what = "", const std::string& hint = "");

// A bound on the memory that the tree takes, known before parsing.
int64_t json_memory(std::string_view text);

// "an object", "a string", ...
const char* type_name(Json::Type type);

// For messages: the value as written in the text, shortened if long.
std::string shown(std::string_view text, const Json& value);

}  // namespace unflip
