// Mutations. Half of them change the network and make the rest fit, so that nearly all results load. The others change text and
// bytes, keeping the container's frame. Both keep the hash right.
#pragma once

#include "file.h"
#include "limits.h"
#include "random.h"

namespace fuzz {

Bytes mutated(const Bytes& file, const unflip::Limits& limits, Random& random);

}  // namespace fuzz
