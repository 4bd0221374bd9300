// Checks that the running NIXL has the layouts that this plugin was built for.
#pragma once

#include "abi.hpp"

namespace abi {

// Returns true if the parameters and the installed backends match. Otherwise prints the reason to
// standard error.
bool matches(const InitParams *init);

} // namespace abi
