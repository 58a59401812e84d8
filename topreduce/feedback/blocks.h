#pragma once

#include <algorithm>

#include "topreduce/pending.h"

namespace topreduce::feedback {

/// Walks through a sparse vector alongside a pass over the exchange it belongs to.
class Cursor {
 public:
  explicit Cursor(const SparseVector& entries) : entries_(entries) {}

  /// Calls visit(i - start, value) for the entries in [start, end); calls must go forward, and may
  /// leave stretches out.
  template <class Visit>
  void advance(std::size_t start, std::size_t end, Visit&& visit) {
    while (next_ < entries_.size() && entries_.indices[next_] < start) ++next_;
    for (; next_ < entries_.size() && entries_.indices[next_] < end; ++next_) {
      visit(entries_.indices[next_] - start, entries_.values[next_]);
    }
  }

 private:
  const SparseVector& entries_;
  std::size_t next_ = 0;
};

/// A stretch that fits in the cache, so that dense and sparse work on it share one trip to memory.
struct Block {
  std::size_t start, end;     ///< in the exchange's numbering
  std::size_t offset;         ///< of its first entry in the flat memory
  std::span<float> gradient;  ///< end - start entries
};

/// Calls body(Block) for all of `segments`, in order.
template <class Body>
void for_each_block(std::span<const Segment> segments, Body&& body) {
  constexpr std::size_t kBlock = 1 << 14;
  for (const Segment& segment : segments) {
    for (std::size_t at = 0; at < segment.size(); at += kBlock) {
      const std::size_t count = std::min(kBlock, segment.size() - at);
      body(Block{segment.start + at, segment.start + at + count, segment.offset + at,
                 segment.gradient.subspan(at, count)});
    }
  }
}

}  // namespace topreduce::feedback
