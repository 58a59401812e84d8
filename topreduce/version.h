#pragma once

namespace topreduce {

/// "major.minor.patch", as in CMakeLists.txt. Ranks must run the same version.
const char* version();

}  // namespace topreduce
