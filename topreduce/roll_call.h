#pragma once

#include <cstdint>
#include <vector>

#include "topreduce/attendance.h"
#include "topreduce/exchange/courier.h"

namespace topreduce {

/// Finds out together what every rank has to say. It takes a round, but only in steps in which some
/// rank has something to say: all others learn that from the vote (Vote::ask).
class RollCall {
 public:
  /// A step starts: everyone is present and uses everything.
  void begin(std::size_t parameters, int ranks);

  /// What this rank has to say, on top of what it said before. Parameters must exist.
  void note(const Attendance& attendance);
  bool asks() const;  ///< whether that takes a round

  /// The round. Throws std::invalid_argument on every rank if they differ in the divisor.
  void hold(const wire::Envelope& envelope, exchange::Courier& courier);

  bool used(std::size_t parameter) const;  ///< by any rank
  bool all_used() const { return all_used_; }
  int divisor() const { return divisor_; }

 private:
  std::size_t parameters_ = 0;
  int divisor_ = 1;
  bool all_used_ = true;
  std::vector<std::uint32_t> said_;   // flags, then a bit per parameter
  SparseVector mine_;                 // its words that are not 0
  std::vector<std::uint32_t> words_;  // the same of all ranks together: 1 where no rank used it
  std::vector<SparseVector> parts_;
};

}  // namespace topreduce
