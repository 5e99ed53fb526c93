// SHA-256 (FIPS 180-4).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace unflip {

class Sha256 {
 public:
  void add(const uint8_t* data, size_t size);
  std::string hex();  // the digest as 64 lowercase digits; nothing may be added afterwards

 private:
  void block(const uint8_t* data);

  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t pending_[64] = {};
  size_t pending_size_ = 0;
  uint64_t total_ = 0;
};

}  // namespace unflip
