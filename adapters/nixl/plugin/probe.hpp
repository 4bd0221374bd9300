// Whether the NIXL that runs is one whose layouts this plugin has.
#pragma once

#include "abi.hpp"

namespace abi {

// Looks at what NIXL passes, and at the backends beside it. Otherwise says why on standard error.
bool matches(const InitParams *init);

} // namespace abi
