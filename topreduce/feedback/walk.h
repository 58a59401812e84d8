#pragma once

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

}  // namespace topreduce::feedback
