#include "limits.h"

#include <string>

#include "fail.h"

namespace unflip {
namespace {

// 1234567 as "1,234,567".
std::string grouped(int64_t number) {
  std::string digits = std::to_string(number);
  for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) digits.insert(static_cast<size_t>(at), ",");
  return digits;
}

[[noreturn]] void refuse(const std::string& what, Size needed, int64_t limit, const std::string& unit, const char* option) {
  const std::string most = needed.value() == Size::kMost ? "more than " : "";
  fail(what + " may need " + most + grouped(needed.value()) + unit + "; the limit is " + grouped(limit) +
       ". If you trust the file, raise the limit with " + option);
}

}  // namespace

void check_memory(Size needed, const Limits& limits) {
  if (needed.value() > limits.memory)
    refuse("loading the network and running one sample", needed, limits.memory, " bytes of memory", "max_memory");
}

void check_limits(const Needs& needs, const Limits& limits) {
  check_memory(needs.memory(), limits);
  if (needs.load_work.value() > limits.work)
    refuse("loading the network", needs.load_work, limits.work, " units of work", "max_work");
  if (needs.run_work.value() > limits.work)
    refuse("running one sample", needs.run_work, limits.work, " units of work", "max_work");
}

}  // namespace unflip
