#pragma once

#include <string>

#include "topreduce/select/caps.h"
#include "topreduce/select/sample.h"
#include "topreduce/select/strongest.h"

namespace topreduce::select {

/// Cuts buckets the moment they arrive, by one threshold for the whole model that the last step
/// left behind, and gathers what the threshold of the next step can be told from: a sample of what
/// is left, moved on by what momentum does to it, plus or minus a gradient like this one.
///
/// A stale threshold must not send everything: each parameter has a cap (caps.h), above which it
/// sends its strongest entries. The first step knows no threshold: each parameter sends its share
/// by size.
class ThresholdPredictor {
 public:
  /// `name` stands before the names of its state.
  ThresholdPredictor(std::string_view name, const Layout& layout)
      : name_(name), model_(std::max<std::size_t>(1, layout.size())), caps_(layout) {}

  void begin(const Budget& budget);
  /// As Selector::choose.
  void choose(const CompensatedGradient& compensated, SparseVector& selected,
              kernels::Summary& summary, double& look_seconds);

  /// As Selector::lets_go: without a threshold entries are looked at again.
  bool lets_go() const { return cut_ > 0; }

  const Budget& budget() const { return budget_; }
  float cut() const { return cut_; }                ///< of this step; 0 if none is known yet
  double count() const { return caps_.sent(); }     ///< entries chosen in this step
  const Sample& sample() const { return sample_; }  ///< of the next step

  /// Keeps `threshold` for the next step.
  void commit(double threshold);
  void visit(StateVisitor& visitor);

 private:
  void look(const Segment& segment, const CompensatedGradient& compensated,
            kernels::Summary& summary, double& look_seconds);
  void choose_on_device(const CompensatedGradient& compensated, SparseVector& selected);

  std::string name_;
  std::size_t model_;  // entries
  Budget budget_;
  float cut_ = 0;
  Caps caps_;
  double threshold_ = 0;  // for the next step
  double last_k_ = 1;
  Strongest strongest_;
  Sample sample_;
  std::vector<float> cuts_;  // by segment
};

}  // namespace topreduce::select
