#pragma once

#include <array>
#include <numeric>

#include "topreduce/exchange/delivery.h"
#include "topreduce/feedback/blocks.h"

namespace topreduce::feedback {

/// Walks through a delivery alongside a pass over the blocks of its exchange, whether it brought
/// some entries or all.
class Walk {
 public:
  explicit Walk(const exchange::Delivery& delivery)
      : delivery_(delivery), settled_(delivery.settled), sum_(delivery.sum) {}

  /// Calls visit(i, value) for all that this rank settled in `block`; had(i) is what it had there.
  template <class Had, class Visit>
  void settled(const Block& block, Had&& had, Visit&& visit) {
    if (delivery_.extent == exchange::Delivery::Extent::entries) {
      return settled_.advance(block.start, block.end, visit);
    }
    const bool all = delivery_.dense_settled.empty();
    for (std::size_t i = 0; i < block.gradient.size(); ++i) {
      visit(i, all ? had(i) : delivery_.dense_settled[block.start + i]);
    }
  }

  /// Calls visit(i, value) for all that was delivered in `block`.
  template <class Visit>
  void sum(const Block& block, Visit&& visit) {
    if (delivery_.extent == exchange::Delivery::Extent::entries) {
      return sum_.advance(block.start, block.end, visit);
    }
    for (std::size_t i = 0; i < block.gradient.size(); ++i) {
      visit(i, delivery_.dense_sum[block.start + i]);
    }
  }

 private:
  const exchange::Delivery& delivery_;
  Cursor settled_, sum_;
};

/// Passes over all blocks of `pending`, on its threads, and adds up what body(block, walk) returns.
template <class Body>
double sum_over_blocks(const Pending& pending, const exchange::Delivery& delivery,
                       const Body& body) {
  const Stretches stretches(pending.size());
  std::array<double, Stretches::kMost> sums{};
  pending.threads().for_each(stretches.count(), [&](std::size_t s) {
    Walk walk(delivery);
    for_each_block(pending, stretches.begin(s), stretches.begin(s + 1),
                   [&](const Block& block) { sums[s] += body(block, walk); });
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace topreduce::feedback
