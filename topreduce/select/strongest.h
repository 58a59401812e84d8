#pragma once

#include "topreduce/pending.h"

namespace topreduce::select {

/// The smallest threshold: everything but zero passes. Zeros are never worth sending.
inline constexpr float kNonZero = 1e-45f;

/// Exact top-k of a stream of entries, in one pass if the floor is a good guess.
///
/// Candidates above the floor are collected in index order. When too many came, only the `limit`
/// strongest stay and the floor rises to them: nothing that belongs to the result is ever dropped.
class Strongest {
 public:
  /// Starts over: the `limit` strongest entries of magnitude >= `floor` are wanted.
  void begin(std::size_t limit, float floor);

  /// Looks at more entries; their indices, counted from `first`, follow all earlier ones.
  void look(const kernels::Terms& terms, Index first, kernels::Seen& seen);

  /// The same for all of `pending`, which may be on a device.
  void look(const Pending& pending, kernels::Seen& seen);

  /// Candidates held now; at least min(limit, entries above the first floor).
  std::size_t size() const { return count_; }

  /// Appends the min(limit, size) strongest to `selected`, ties to the lower index, in index order.
  /// Returns the magnitude of the weakest of them, 0 if there is none.
  float finish(SparseVector& selected);

 private:
  float cut();  // to the limit
  void cut_if_many();
  void look_on_device(Device& device);

  std::size_t limit_ = 0;
  float floor_ = 0;
  std::size_t count_ = 0;
  SparseVector candidates_, found_;
};

}  // namespace topreduce::select
