#pragma once

namespace topreduce {

// Known when tests run, not when they are compiled: builds with and without sanitizers share
// objects.
extern const bool kSanitized;         ///< some sanitizer watches the library
extern const bool kThreadsSanitized;  ///< it is the one for data races

}  // namespace topreduce
