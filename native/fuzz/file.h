// A .unflip file in parts that a mutation can change: as bytes (Frame) and as a network (Draft). Both write the right SHA-256.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "json.h"

namespace fuzz {

using Bytes = std::vector<uint8_t>;
using unflip::Json;

// Header and data, without their meaning.
struct Frame {
  std::string header;
  Bytes data;
};

std::optional<Frame> split(const uint8_t* bytes, size_t size);
Bytes joined(const Frame& frame);

struct Tensor {
  bool is_float = true;
  std::vector<int64_t> shape;
  Bytes bytes;
};

struct Draft {
  Json graph;
  std::map<std::string, Tensor> tensors;
};

// Nothing if the tensors' table is wrong, or the graph is not JSON.
std::optional<Draft> read_draft(const Frame& frame);
Bytes written(const Draft& draft);

// JSON values.
Json number(double value);
Json text(const std::string& value);
Json boolean(bool value);
Json list(const std::vector<double>& numbers);
Json* find(Json& object, const std::string& key);
void set(Json& object, const std::string& key, Json value);
void erase(Json& object, const std::string& key);

}  // namespace fuzz
