#pragma once

#include "topreduce/exchange/courier.h"
#include "topreduce/exchange/delivery.h"
#include "topreduce/pending.h"
#include "topreduce/select/selector.h"
#include "topreduce/state.h"

namespace topreduce::exchange {

/// What an exchange is expected to cost each rank.
struct Cost {
  std::uint64_t rounds = 0;
  double values = 0;   ///< values sent
  double indices = 0;  ///< indices sent beside them
};

/// Adds up over the ranks: one published algorithm, all of its communication in it.
class Exchange {
 public:
  virtual ~Exchange() = default;

  /// A step starts; its exchanges follow. Also after a step that failed.
  virtual void begin(const select::Budget&) {}

  /// Sums over the ranks and says what this rank settled. `selected` is what this rank chose alone;
  /// an exchange that chooses together gets it empty and looks at `pending` itself.
  /// Every rank must hear from every other at least once: that is how the vote travels.
  virtual void run(const Pending& pending, const SparseVector& selected,
                   const select::Budget& budget, Courier& courier, Delivery& delivery) = 0;

  /// Of one exchange of `size` entries in which every rank sends k, with `ranks` ranks.
  virtual Cost cost(double k, double size, int ranks) const = 0;

  /// Whether it must see the whole model at once (granularity=model).
  virtual bool needs_whole_model() const { return false; }

  /// As for Selector: what is kept between steps changes in `commit` only.
  virtual void commit() {}
  virtual void visit(StateVisitor&) {}
};

}  // namespace topreduce::exchange
