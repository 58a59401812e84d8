#pragma once

#include <algorithm>

#include "topreduce/compensated_gradient.h"

namespace topreduce::feedback {

/// Walks through a sparse vector alongside a pass over the exchange it belongs to.
class Cursor {
 public:
  explicit Cursor(const SparseVector& entries) : entries_(entries) {}

  /// Calls visit(i - start, value) for the entries in [start, end); calls must go forward, from
  /// anywhere on, and may leave stretches out.
  template <class Visit>
  void advance(std::size_t start, std::size_t end, Visit&& visit) {
    if (next_ < entries_.size() && entries_.indices[next_] < start) skip_to(start);
    for (; next_ < entries_.size() && entries_.indices[next_] < end; ++next_) {
      visit(entries_.indices[next_] - start, entries_.values[next_]);
    }
  }

 private:
  void skip_to(std::size_t start) {
    const auto from = entries_.indices.begin() + static_cast<std::ptrdiff_t>(next_);
    next_ = static_cast<std::size_t>(std::lower_bound(from, entries_.indices.end(), start) -
                                     entries_.indices.begin());
  }

  const SparseVector& entries_;
  std::size_t next_ = 0;
};

/// A stretch that fits in the cache, so that dense and sparse work on it share one trip to memory.
struct Block {
  std::size_t start, end;     ///< in the exchange's numbering
  std::size_t offset;         ///< of its first entry in the flat memory
  std::span<float> gradient;  ///< end - start entries
  std::span<float> mean;      ///< where the mean goes
};

/// Calls body(Block) for all of `compensated` in [begin, end) of the exchange, in order.
template <class Body>
void for_each_block(const CompensatedGradient& compensated, std::size_t begin, std::size_t end,
                    Body&& body) {
  constexpr std::size_t kBlock = 1 << 14;
  compensated.visit(begin, end, [&](const Segment& segment, std::size_t first, std::size_t count) {
    for (std::size_t at = first; at < first + count; at += kBlock) {
      const std::size_t start = segment.start + at, size = std::min(kBlock, first + count - at);
      const std::span<float> gradient = segment.gradient.subspan(at, size);
      body(Block{start, start + size, segment.offset + at, gradient,
                 segment.mean.empty() ? gradient : segment.mean.subspan(at, size)});
    }
  });
}

}  // namespace topreduce::feedback
