#pragma once

#include <cstdint>

#include "topreduce/comm/communicator.h"
#include "topreduce/stats.h"
#include "topreduce/vote.h"

namespace topreduce {

/// The word between ranks that hold different parts of one model (shards) and commit together: each
/// has voted with those that hold the same part, and none has committed. A rank that hears *yes* of
/// all others knows that every part went through everywhere.
class JointVote {
 public:
  /// The ranks that hold the other parts; null: there are none.
  void join(Communicator* others) { others_ = others; }
  bool any() const { return others_ != nullptr; }

  /// A step starts.
  void enter(std::uint64_t step);
  /// The step is dropped before anything was sent.
  void leave() noexcept;
  /// Collective over the others: whether all say yes. `measured` becomes that of all parts. What it
  /// costs is counted apart.
  bool hold(std::uint64_t step, bool yes, std::optional<tuning::Measurement>& measured,
            StepStats& running);

 private:
  Communicator* others_ = nullptr;
  StepVote vote_;
};

}  // namespace topreduce
