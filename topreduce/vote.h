#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "topreduce/comm/communicator.h"
#include "topreduce/participation.h"
#include "topreduce/storage.h"
#include "topreduce/tuning/measurement.h"
#include "topreduce/wire/seal.h"

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
    /// A fingerprint of what all ranks must have alike; 0: nothing is compared.
    std::uint32_t alike = 0;
    /// What this rank measured of the last step, for all to know; all must tell it, or none.
    std::optional<tuning::Measurement> measured = std::nullopt;
  };
  /// Collective. Throws std::invalid_argument on every rank if they differ in the divisor,
  /// WireError if they differ in the loss scale. Returns the number of rounds.
  std::uint64_t hold(const Ballot& ballot, Communicator& comm);

  /// What a vote that went through has decided, for a rank that could not hear it.
  struct Outcome {
    std::uint64_t step = 0;
    int divisor = 1;
    float loss_scale = 0;           ///< of a rank that knows it
    std::vector<std::byte> unused;  ///< a bit for each parameter that no rank used; empty: none

    static std::size_t bytes_for(std::size_t parameters);
    void store(std::span<std::byte> bytes) const;
    void load(std::span<const std::byte> bytes);
  };
  void tell(Outcome& outcome, std::uint64_t step, float loss_scale) const;
  void adopt(const Outcome& outcome);

  bool finite() const { return finite_; }           ///< on all ranks
  bool alike() const { return alike_; }             ///< all ranks gave the same fingerprint
  float loss_scale() const { return loss_scale_; }  ///< of those that know it; 0: none does
  bool used(std::size_t parameter) const;           ///< by any rank
  bool all_used() const { return all_used_; }
  int divisor() const { return divisor_; }
  /// What was measured, merged over the ranks; nothing if nobody told.
  const std::optional<tuning::Measurement>& measured() const { return measured_; }

 private:
  void hold_participation(const wire::Identity& identity, std::uint32_t round, std::uint64_t step,
                          Communicator& comm);

  std::size_t parameters_ = 0;
  bool finite_ = true;
  bool alike_ = true;
  float loss_scale_ = 0;
  int divisor_ = 1;
  bool all_used_ = true;
  bool asks_ = false;
  std::optional<tuning::Measurement> measured_;
  std::vector<std::byte> mine_;  // flags, then a bit for each parameter that this rank left unused
  std::vector<std::byte> unused_;  // a bit for each parameter that no rank used
};

}  // namespace topreduce
