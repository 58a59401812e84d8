#pragma once

#include "topreduce/budget.h"
#include "topreduce/compensated_gradient.h"
#include "topreduce/layout.h"
#include "topreduce/state.h"

namespace topreduce::select {

/// Chooses alone, without the network, which entries this rank sends. Choosing is choosing a
/// threshold; what is kept between steps changes in `commit` only, so a failed step leaves no
/// trace.
class Selector {
 public:
  virtual ~Selector() = default;

  /// A step starts. Its exchanges follow, in any cut of the model into buckets; a selector for
  /// granularity `model` gets exactly one.
  virtual void begin(const Budget& budget) = 0;

  /// Replaces `selected` with the chosen entries of `compensated`, and `summary` with what a pass
  /// over all of them saw. If not `seen.finite()`, the step is lost anyway and `selected` does not
  /// matter. `look_seconds` grows by the time spent in passes over all entries.
  virtual void choose(const CompensatedGradient& compensated, SparseVector& selected,
                      kernels::Summary& summary, double& look_seconds) = 0;

  /// Whether `choose` lets go of every entry in this step, also of what is not finite.
  virtual bool lets_go() const { return false; }

  /// The step's exchanges went through on every rank: adopt what this step taught.
  virtual void commit() = 0;

  /// Whether it can choose on a device, where no pass of its own over the entries is possible.
  virtual bool works_on_device(Budget::Exchanges) const { return false; }

  /// Shows every value that the next step depends on.
  virtual void visit(StateVisitor& visitor) = 0;
};

}  // namespace topreduce::select
