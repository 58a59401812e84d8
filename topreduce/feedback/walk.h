#pragma once

#include <array>
#include <numeric>

#include "topreduce/exchange/result.h"
#include "topreduce/feedback/blocks.h"

namespace topreduce::feedback {

/// Walks through a delivery alongside a pass over the blocks of its exchange, whether it brought
/// some entries or all.
class Walk {
 public:
  explicit Walk(const exchange::Result& result)
      : result_(result), settled_(result.settled), sum_(result.sum) {}

  /// Calls visit(i, value) for all that this rank settled in `block`; had(i) is what it had there.
  template <class Had, class Visit>
  void settled(const Block& block, Had&& had, Visit&& visit) {
    if (result_.extent == exchange::Result::Extent::entries) {
      return settled_.advance(block.start, block.end, visit);
    }
    const bool all = result_.dense_settled.empty();
    for (std::size_t i = 0; i < block.gradient.size(); ++i) {
      visit(i, all ? had(i) : result_.dense_settled[block.start + i]);
    }
  }

  /// Calls visit(i, value) for all that was delivered in `block`.
  template <class Visit>
  void sum(const Block& block, Visit&& visit) {
    if (result_.extent == exchange::Result::Extent::entries) {
      return sum_.advance(block.start, block.end, visit);
    }
    for (std::size_t i = 0; i < block.gradient.size(); ++i) {
      visit(i, result_.dense_sum[block.start + i]);
    }
  }

 private:
  const exchange::Result& result_;
  Cursor settled_, sum_;
};

/// Passes over all blocks of `compensated`, on its threads, and adds up what body(block, walk)
/// returns.
template <class Body>
double sum_over_blocks(const CompensatedGradient& compensated, const exchange::Result& result,
                       const Body& body) {
  const Chunks chunks(compensated.size());
  std::array<double, Chunks::kMost> sums{};
  compensated.threads().for_each(chunks.count(), [&](std::size_t s) {
    Walk walk(result);
    for_each_block(compensated, chunks.begin(s), chunks.begin(s + 1),
                   [&](const Block& block) { sums[s] += body(block, walk); });
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace topreduce::feedback
