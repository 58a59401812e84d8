#pragma once

#include "topreduce/api.h"

namespace topreduce {

/// "major.minor.patch", as in CMakeLists.txt. Ranks must run the same version.
TOPREDUCE_API const char* version();

}  // namespace topreduce
