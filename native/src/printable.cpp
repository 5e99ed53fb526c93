#include "printable.h"

#include <cstdint>
#include <cstdio>

namespace unflip {
namespace {

struct Character {
  uint32_t code = 0;
  size_t bytes = 0;  // 0: not UTF-8
};

Character first_of(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) return {byte(0), 1};
  const size_t bytes = byte(0) >= 0xF0 ? 4 : byte(0) >= 0xE0 ? 3 : 2;
  if (byte(0) < 0xC2 || byte(0) > 0xF4 || text.size() < bytes) return {};
  uint32_t code = byte(0) & (0x7Fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3Fu);
  }
  const uint32_t least = bytes == 2 ? 0x80 : bytes == 3 ? 0x800 : 0x10000;
  if (code < least || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return {};
  return {code, bytes};
}

// The categories Cc, Cf, Zl and Zp of Unicode, private and unassigned planes, and letters and marks that show nothing.
bool is_printable(uint32_t c) {
  if (c == 0x34F || c == 0x115F || c == 0x1160 || c == 0x17B4 || c == 0x17B5 || c == 0x2800 || c == 0x3164) return false;
  if (c == 0xFFA0 || (c >= 0x180B && c <= 0x180F)) return false;
  if (c < 0x20 || (c >= 0x7F && c < 0xA0) || c == 0xAD) return false;
  if ((c >= 0x600 && c <= 0x605) || c == 0x61C || c == 0x6DD || c == 0x70F) return false;
  if (c == 0x890 || c == 0x891 || c == 0x8E2) return false;
  if (c == 0x180E || (c >= 0x200B && c <= 0x200F) || (c >= 0x2028 && c <= 0x202E) || (c >= 0x2060 && c <= 0x206F)) return false;
  if ((c >= 0xE000 && c <= 0xF8FF) || c == 0xFEFF || (c >= 0xFFF0 && c <= 0xFFFB) || (c & 0xFFFE) == 0xFFFE) return false;
  if (c == 0x110BD || c == 0x110CD || (c >= 0x13430 && c <= 0x1343F) || (c >= 0x1BCA0 && c <= 0x1BCA3)) return false;
  return !(c >= 0x1D173 && c <= 0x1D17A) && c < 0xE0000;
}

std::string escaped(uint32_t code, const char* format) {
  char text[16];
  std::snprintf(text, sizeof text, format, static_cast<unsigned>(code));
  return text;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    Character c = first_of(text);
    if (c.bytes == 0) {
      c = {static_cast<unsigned char>(text[0]), 1};
      result += escaped(c.code, "\\x%02x");
    } else if (!is_printable(c.code)) {
      result += escaped(c.code, c.code < 0x100 ? "\\x%02x" : c.code < 0x10000 ? "\\u%04x" : "\\U%08x");
    } else {
      result.append(text.substr(0, c.bytes));
    }
    text.remove_prefix(c.bytes);
  }
  return result;
}

}  // namespace unflip
