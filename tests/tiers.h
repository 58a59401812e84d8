#pragma once

#include <cstdlib>

namespace topreduce {

/// TOPREDUCE_LONG_TESTS is set: tests take all rows, ranks and steps, and as long as that does.
/// Else they take some of each, and miss no method, stage, format or kind of fault.
inline const bool kLong = std::getenv("TOPREDUCE_LONG_TESTS") != nullptr;

}  // namespace topreduce
