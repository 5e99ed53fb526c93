// A small strict JSON reader for files that nobody vouches for: what it accepts is RFC 8259, less duplicate keys, and with limits
// on depth and on the number of values, so that a small file cannot become a large tree.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace unflip {

struct Json {
  enum class Type { Null, Bool, Number, String, Array, Object };

  Type type = Type::Null;
  bool boolean = false;
  double number = 0;
  std::string string;
  std::vector<Json> items;        // of an array, or an object's values
  std::vector<std::string> keys;  // of an object, one for each item
  size_t begin = 0, end = 0;      // where it stands in the text

  const Json* find(std::string_view key) const;  // in an object; null where it has none
};

// Throws std::runtime_error: what is wrong, and at which byte.
Json parse_json(std::string_view text);

// "an object", "a string", ...
const char* type_name(Json::Type type);

// For messages: the value as it stands in the text, cut where it is long.
std::string shown(std::string_view text, const Json& value);

}  // namespace unflip
