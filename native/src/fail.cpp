#include "fail.h"

#include <new>
#include <stdexcept>

namespace unflip {

void fail(const std::string& what) { throw std::runtime_error(what); }
void fail_for_memory() { throw std::bad_alloc(); }

}  // namespace unflip
