#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "topreduce/comm/communicator.h"
#include "topreduce/participation.h"
#include "topreduce/storage.h"
#include "topreduce/tuning/measurement.h"

namespace topreduce {

/// The last words of a step, before anything is committed: every rank says that all its exchanges
/// went through and whether all was finite, and hears it of all others, directly or through one
/// that did. With P ranks that takes log8 P rounds of at most 7 short messages. A rank that has
/// more to say (participation.h) asks for one more round.
class StepVote {
 public:
  /// A step starts: everyone is present and uses everything.
  void begin(std::size_t parameters, int ranks);

  /// What this rank has to say beside its gradients, on top of what it said before. Parameters must
  /// exist.
  void note(const Participation& participation);

  /// What this rank votes.
  struct Ballot {
    std::uint64_t run = 0, step = 0;
    bool finite = true;
    float loss_scale = 0;  ///< 0: not known
    /// Whether all ranks that know it must have the same.
    bool one_scale = false;
    /// Of what all ranks must have alike, the sums; 0: they are not compared.
    std::uint32_t sums = 0;
    /// What this rank measured of the last step, for all to know; all must tell it, or none.
    std::optional<tuning::Measurement> measured = std::nullopt;
  };
  /// Collective. Throws std::invalid_argument on every rank if they differ in the divisor,
  /// WireError if they differ in the loss scale or the sums. Returns the number of rounds.
  std::uint64_t hold(const Ballot& ballot, Communicator& comm);

  bool finite() const { return finite_; }           ///< on all ranks
  float loss_scale() const { return loss_scale_; }  ///< of those that know it; 0: none does
  bool used(std::size_t parameter) const;           ///< by any rank
  bool all_used() const { return all_used_; }
  int divisor() const { return divisor_; }
  /// What was measured, merged over the ranks; nothing if nobody told.
  const std::optional<tuning::Measurement>& measured() const { return measured_; }

 private:
  void hold_participation(Communicator& comm);

  std::size_t parameters_ = 0;
  bool finite_ = true;
  float loss_scale_ = 0;
  int divisor_ = 1;
  bool all_used_ = true;
  bool asks_ = false;
  std::optional<tuning::Measurement> measured_;
  std::vector<std::byte> mine_;  // flags, then a bit for each parameter that this rank left unused
  std::vector<std::byte> unused_;  // a bit for each parameter that no rank used
  comm::Inbox inbox_;
};

}  // namespace topreduce
