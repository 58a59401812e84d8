#pragma once

#include "topreduce/budget.h"
#include "topreduce/compensated_gradient.h"
#include "topreduce/exchange/channel.h"
#include "topreduce/exchange/result.h"
#include "topreduce/exchange/task.h"
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
  virtual void begin(const Budget&) {}

  /// Sums over the ranks and says what this rank settled. `selected` is what this rank chose alone;
  /// an exchange that chooses together gets it empty and looks at `compensated` itself. Several may
  /// be under way: what one keeps across a wait is its own. All arguments outlive the task.
  virtual Task run(const CompensatedGradient& compensated, const SparseVector& selected,
                   const Budget& budget, Channel& channel, Result& result) = 0;

  /// Of one exchange of `size` entries in which every rank sends k, with `ranks` ranks.
  virtual Cost cost(double k, double size, int ranks) const = 0;

  /// Whether it must see the whole model at once (granularity=model).
  virtual bool needs_whole_model() const { return false; }

  /// As for Selector: what is kept between steps changes in `commit` only.
  virtual void commit() {}
  virtual void visit(StateVisitor&) {}
};

}  // namespace topreduce::exchange
