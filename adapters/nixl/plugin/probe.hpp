// Checks that the running NIXL has the layouts that this plugin was built for.
#pragma once

#include "abi.hpp"

namespace abi {

// Returns true if the layouts of `init` and of the installed backends are those that this plugin
// was built for. Otherwise prints the reason to standard error.
bool matches(const InitParams *init);

} // namespace abi
