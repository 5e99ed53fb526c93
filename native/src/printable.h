// Text that may come from a file, for messages: a terminal must not interpret it.
#pragma once

#include <string>
#include <string_view>

namespace unflip {

// Replaces control characters, invisible ones, those that change the direction of text, and bytes that are not UTF-8 by escapes
// such as \x1b and \u202e.
std::string printable(std::string_view text);

}  // namespace unflip
