#pragma once

#include <stdexcept>

// A caller's mistake is std::invalid_argument (ValueError in Python). The two below are not.

namespace topreduce {

/// The network or a peer failed: the step did not happen, what is owed is unchanged.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A peer's message could not be trusted: damaged, foreign, or out of step.
class WireError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace topreduce
