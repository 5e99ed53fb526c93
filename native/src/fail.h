// Every error of the library begins here.
#pragma once

#include <string>

namespace unflip {

// Throws std::runtime_error. WebAssembly has no C++ exceptions: there it calls JavaScript, which throws, and no destructor runs.
// JavaScript then drops the module's memory.
[[noreturn]] void fail(const std::string& what);

// Throws std::bad_alloc; in WebAssembly like fail().
[[noreturn]] void fail_for_memory();

}  // namespace unflip
