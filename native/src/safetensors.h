// The container of a .unflip file (docs/format.md): a safetensors file whose metadata contain the graph and a SHA-256 of the
// file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "limits.h"

namespace unflip {

enum class Dtype { F32, U8 };

struct Tensor {
  Dtype dtype = Dtype::F32;
  std::vector<int64_t> shape;
  const uint8_t* data = nullptr;  // not aligned; points into the file's bytes
  size_t bytes = 0;
  // For the reader of the graph: whether the graph uses it, whether its numbers were checked, and the first one that is not 0.
  bool used = false, checked = false;
  float first = 0;
};

struct Container {
  std::string graph;  // JSON
  // Not a hash table: a file can choose names that all have the same hash, and loading it would take quadratic time.
  std::map<std::string, Tensor> tensors;
  Size memory;  // bound on the peak so far: the file, its header and the table of tensors
};

// Checks sizes, the table of tensors, format, version and, with check_hash, the SHA-256. Throws std::runtime_error.
// The tensors point into data, which must outlive them.
Container read_container(const uint8_t* data, size_t size, const Limits& limits, bool check_hash);

}  // namespace unflip
