#pragma once

#include <stdexcept>

#include "topreduce/api.h"

// A caller's mistake is std::invalid_argument (ValueError in Python). Those below are not.

namespace topreduce {

/// The network or a peer failed: the step did not happen, what is owed is unchanged.
class TOPREDUCE_API CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A peer's message could not be trusted: damaged, foreign, or out of step.
class TOPREDUCE_API WireError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The ranks no longer hold the same model, or would apply different means: the step did not
/// happen.
class TOPREDUCE_API DriftError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace topreduce
