#include "file.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>

#include "sha256.h"

namespace fuzz {
namespace {

const std::string kHashKey = "\"sha256\":\"";
constexpr size_t kHashDigits = 64;

std::string quoted(const std::string& value) {
  std::string out = "\"";
  for (char c : value) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string dumped(const Json& value) {
  switch (value.type) {
    case Json::Type::Null: return "null";
    case Json::Type::Bool: return value.boolean ? "true" : "false";
    case Json::Type::String: return quoted(value.string);
    case Json::Type::Number: {
      char digits[40];
      std::snprintf(digits, sizeof digits, "%.17g", value.number);
      return digits;
    }
    default: break;
  }
  const bool object = value.type == Json::Type::Object;
  std::string out = object ? "{" : "[";
  for (size_t i = 0; i < value.items.size(); ++i) {
    if (i > 0) out += ",";
    if (object) out += quoted(value.keys[i]) + ":";
    out += dumped(value.items[i]);
  }
  return out + (object ? "}" : "]");
}

// Writes the hash of the file into its header, if that has a place for it.
void correct_hash(Bytes& bytes, size_t header) {
  const auto end = bytes.begin() + 8 + static_cast<std::ptrdiff_t>(header);
  const auto key = std::search(bytes.begin() + 8, end, kHashKey.begin(), kHashKey.end());
  if (static_cast<size_t>(end - key) < kHashKey.size() + kHashDigits) return;
  const auto digits = key + static_cast<std::ptrdiff_t>(kHashKey.size());
  std::fill(digits, digits + kHashDigits, uint8_t{'0'});
  unflip::Sha256 hash;
  hash.add(bytes.data(), bytes.size());
  const std::string hex = hash.hex();
  std::copy(hex.begin(), hex.end(), digits);
}

}  // namespace

std::optional<Frame> split(const uint8_t* bytes, size_t size) {
  if (size < 8) return {};
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | bytes[i];
  if (length > size - 8) return {};
  Frame frame;
  frame.header.assign(reinterpret_cast<const char*>(bytes) + 8, static_cast<size_t>(length));
  frame.data.assign(bytes + 8 + length, bytes + size);
  return frame;
}

Bytes joined(const Frame& frame) {
  Bytes bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<uint8_t>(static_cast<uint64_t>(frame.header.size()) >> (8 * i)));
  bytes.insert(bytes.end(), frame.header.begin(), frame.header.end());
  bytes.insert(bytes.end(), frame.data.begin(), frame.data.end());
  correct_hash(bytes, frame.header.size());
  return bytes;
}

std::optional<Draft> read_draft(const Frame& frame) try {
  Draft draft;
  const Json header = unflip::parse_json(frame.header);
  for (size_t i = 0; i < header.keys.size(); ++i) {
    const Json& entry = header.items[i];
    if (header.keys[i] == "__metadata__") {
      const Json* graph = entry.find("graph");
      if (graph == nullptr) return {};
      draft.graph = unflip::parse_json(graph->string);
      continue;
    }
    const Json *dtype = entry.find("dtype"), *shape = entry.find("shape"), *offsets = entry.find("data_offsets");
    if (dtype == nullptr || shape == nullptr || offsets == nullptr || offsets->items.size() != 2) return {};
    const double begin = offsets->items[0].number, end = offsets->items[1].number;
    if (!(0 <= begin && begin <= end && end <= static_cast<double>(frame.data.size()))) return {};
    Tensor tensor;
    tensor.is_float = dtype->string == "F32";
    double bytes = tensor.is_float ? sizeof(float) : 1;
    for (const Json& size : shape->items) {
      if (!(size.number >= 1 && size.number <= 1 << 30)) return {};
      tensor.shape.push_back(static_cast<int64_t>(size.number));
      bytes *= static_cast<double>(tensor.shape.back());
    }
    if (bytes != end - begin) return {};
    tensor.bytes.assign(frame.data.begin() + static_cast<std::ptrdiff_t>(begin),
                        frame.data.begin() + static_cast<std::ptrdiff_t>(end));
    draft.tensors.emplace(header.keys[i], std::move(tensor));
  }
  if (draft.graph.type != Json::Type::Object) return {};
  return draft;
} catch (const std::runtime_error&) {
  return {};
}

Bytes written(const Draft& draft) {
  Frame frame;
  frame.header = "{\"__metadata__\":{\"format\":\"unflip\",\"version\":\"1\"," + kHashKey + std::string(kHashDigits, '0') +
                 "\",\"graph\":" + quoted(dumped(draft.graph)) + "}";
  for (const auto& [name, tensor] : draft.tensors) {
    const std::vector<double> shape(tensor.shape.begin(), tensor.shape.end());
    const size_t begin = frame.data.size(), end = begin + tensor.bytes.size();
    frame.header += "," + quoted(name) + ":{\"dtype\":\"" + (tensor.is_float ? "F32" : "U8") +
                    "\",\"shape\":" + dumped(list(shape)) + ",\"data_offsets\":[" + std::to_string(begin) + "," +
                    std::to_string(end) + "]}";
    frame.data.insert(frame.data.end(), tensor.bytes.begin(), tensor.bytes.end());
  }
  frame.header += "}";
  frame.header.resize((frame.header.size() + 7) / 8 * 8, ' ');
  return joined(frame);
}

Json number(double value) {
  Json json;
  json.type = Json::Type::Number;
  json.number = value;
  return json;
}

Json text(const std::string& value) {
  Json json;
  json.type = Json::Type::String;
  json.string = value;
  return json;
}

Json boolean(bool value) {
  Json json;
  json.type = Json::Type::Bool;
  json.boolean = value;
  return json;
}

Json list(const std::vector<double>& numbers) {
  Json json;
  json.type = Json::Type::Array;
  for (double n : numbers) json.items.push_back(number(n));
  return json;
}

Json* find(Json& object, const std::string& key) { return const_cast<Json*>(object.find(key)); }

void set(Json& object, const std::string& key, Json value) {
  object.type = Json::Type::Object;
  if (Json* found = find(object, key)) {
    *found = std::move(value);
  } else {
    object.keys.push_back(key);
    object.items.push_back(std::move(value));
  }
}

void erase(Json& object, const std::string& key) {
  const auto found = std::find(object.keys.begin(), object.keys.end(), key);
  if (found == object.keys.end()) return;
  object.items.erase(object.items.begin() + (found - object.keys.begin()));
  object.keys.erase(found);
}

}  // namespace fuzz
