#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "topreduce/exchange/channel.h"
#include "topreduce/exchange/task.h"

namespace topreduce::exchange {

/// The k strongest of entries that are spread over the ranks, without gathering them all.
///
///   round 1   every rank shows each s-th of its entries in order of strength: the k-th of all lies
///             between two of those, up to s - 1 unseen ones of each rank
///   round 2   every rank shows what it has between them
///
/// With s = sqrt(k / P) both rounds are small. Ties go to the lower index. Values are compared
/// before they are rounded for their journey.
class GlobalCut {
 public:
  /// Finds where to cut. `mine` and the entries of other ranks must have different indices. One at
  /// a time.
  Task find(const SparseVector& mine, std::size_t k, Channel& channel);

  /// Whether an entry is among the k strongest of all ranks.
  bool keeps(Index index, float value) const { return key_of(index, value) >= cut_; }
  /// The k-th magnitude; 0 if all ranks together have fewer than k entries.
  float magnitude() const;
  /// How many of the k strongest each rank has.
  std::span<const std::size_t> counts() const { return counts_; }

 private:
  // Orders by magnitude, then by lower index.
  using Key = std::uint64_t;
  static Key key_of(Index index, float value);
  static std::size_t count_from(Key least, const SparseVector& entries);
  Task show(std::span<const Key> keys, Channel& channel);

  Key cut_ = 0;
  std::vector<std::size_t> counts_;
  Buffer<Key> mine_, sample_;  // of this rank, strongest first
  Buffer<Key> shown_;          // by all ranks in a round, strongest first
  Buffer<Key> order_;
  SparseVector message_, rounded_;
  Parts parts_;
};

}  // namespace topreduce::exchange
