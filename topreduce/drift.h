#pragma once

#include <cstdint>
#include <string>

#include "topreduce/comm/communicator.h"

namespace topreduce {

/// What all ranks must have alike in a step.
struct Fingerprints {
  std::uint64_t parameters = 0;  ///< as the caller says; 0: not compared
  std::uint64_t sums = 0;        ///< of what everyone applies
};

/// Once the ranks know that they differ: tells everyone's to all, and throws DriftError on every
/// rank, with the ranks that differ from most others. `advice`: if only the sums do. Collective.
[[noreturn]] void report_drift(Communicator& comm, std::uint64_t step, const Fingerprints& mine,
                               const std::string& advice);

}  // namespace topreduce
