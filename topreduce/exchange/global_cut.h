#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "topreduce/exchange/channel.h"
#include "topreduce/exchange/task.h"

namespace topreduce::exchange {

/// The k strongest of entries that are spread over the ranks, without gathering them.
///
/// An entry's key is its magnitude, then its index, so that ties go to the lower one. The key of
/// the k-th is found eight bits at a time: the ranks count their keys by the next eight bits, add
/// up these 256 counts, and go on where the k-th lies. Four all-reduces, whose size depends neither
/// on k nor on the number of ranks, find its magnitude; more are needed only for ties. Values are
/// compared before they are rounded for their journey.
class GlobalCut {
 public:
  /// Finds where to cut. `mine` and the entries of other ranks must have different indices. One at
  /// a time.
  Task find(const SparseVector& mine, std::size_t k, Channel& channel);

  /// Whether an entry is among the k strongest of all ranks.
  bool keeps(Index index, float value) const { return key_of(index, value) >= cut_; }
  /// The k-th magnitude; 0 if all ranks together have no more than k entries.
  float magnitude() const;
  /// How many of the k strongest each rank has.
  std::span<const std::size_t> counts() const { return counts_; }

 private:
  // Orders by magnitude, then by lower index.
  using Key = std::uint64_t;
  static Key key_of(Index index, float value);
  Task share_counts(const SparseVector& mine, Channel& channel);

  Key cut_ = 0;
  std::vector<std::size_t> counts_;
  Buffer<float> histogram_;
  Bytes payload_;
};

}  // namespace topreduce::exchange
