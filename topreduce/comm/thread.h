#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "topreduce/comm/communicator.h"

namespace topreduce::comm {

/// Communicators of `ranks` ranks that live in one process, one for each thread. They share a
/// meeting place: a rank that is destroyed while others still wait releases them with CommError.
TOPREDUCE_API std::vector<std::unique_ptr<Communicator>> make_thread_group(int ranks);

/// Runs `body` once per rank, each in a thread of its own, and waits for all. If bodies throw, the
/// others are released and the first exception that is not a mere consequence is rethrown.
TOPREDUCE_API void run_ranks(int ranks, const std::function<void(Communicator&)>& body);

}  // namespace topreduce::comm

namespace topreduce {
using comm::run_ranks;
}
