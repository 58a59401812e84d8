#include "topreduce/select/threshold_predictor.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "topreduce/floating.h"
#include "topreduce/stats.h"

namespace topreduce::select {
namespace {

constexpr std::size_t kSampleSize = 1 << 17;
constexpr float kNever = std::numeric_limits<float>::infinity();

}  // namespace

void ThresholdPredictor::begin(const Budget& budget) {
  budget_ = budget;
  sample_.begin(budget.model, kSampleSize);
  const auto k = static_cast<double>(budget.entries);
  cut_ = to_magnitude(threshold_ * std::pow(last_k_ / k, kSteepness));
  if (budget.entries >= budget.model) cut_ = kNonZero;
  caps_.begin(budget, cut_ > 0 ? Caps::Threshold::known : Caps::Threshold::unknown);
}

void ThresholdPredictor::choose(const CompensatedGradient& compensated, SparseVector& selected,
                                kernels::Summary& summary, double& look_seconds) {
  selected.clear();
  if (compensated.device() != nullptr) {
    Stopwatch watch(look_seconds);
    caps_.announce(compensated, cut_, sample_.firsts(compensated),
                   static_cast<std::size_t>(sample_.stride()));
    summary = compensated.summarize();
    if (summary.finite()) choose_on_device(compensated, selected);
    return;
  }
  summary = {};
  for (const Segment& segment : compensated.segments()) {
    strongest_.begin(caps_[segment.parameter], cut_);
    look(segment, compensated, summary, look_seconds);
    if (!summary.finite()) continue;
    const std::size_t before = selected.size();
    const float weakest = strongest_.finish(selected);
    caps_.note(segment.parameter, selected.size() - before);
    if (cut_ == 0) {
      const bool none = selected.size() == before;
      sample_.foresee(segment.offset, compensated.terms(segment), none ? kNever : weakest,
                      compensated.drift());
    }
  }
}

void ThresholdPredictor::choose_on_device(const CompensatedGradient& compensated,
                                          SparseVector& selected) {
  caps_.choose_on_device(compensated, cut_, selected);
  cuts_.clear();
  std::size_t next = 0;
  for (const Segment& segment : compensated.segments()) {
    float weakest = kNever;
    const std::size_t end = segment.start + segment.size();
    for (; next < selected.size() && selected.indices[next] < end; ++next) {
      weakest = std::min(weakest, std::abs(selected.values[next]));
    }
    cuts_.push_back(cut_ > 0 ? cut_ : weakest);
  }
  sample_.foresee_on_device(compensated, cuts_);
}

void ThresholdPredictor::look(const Segment& segment, const CompensatedGradient& compensated,
                              kernels::Summary& summary, double& look_seconds) {
  Stopwatch watch(look_seconds);
  strongest_.look(compensated.terms(segment), segment.start, summary, compensated.threads(),
                  [&](std::size_t start, const kernels::Terms& block) {
                    if (cut_ == 0) return;
                    sample_.foresee(segment.offset + start, block, cut_, compensated.drift());
                    compensated.let_go(segment, start, block.size());
                  });
}

void ThresholdPredictor::commit(double threshold) {
  threshold_ = std::min(threshold, state_range::kThreshold.most);
  last_k_ = static_cast<double>(budget_.entries);
  caps_.commit();
}

void ThresholdPredictor::visit(StateVisitor& visitor) {
  visit_number(visitor, name_ + ".threshold", threshold_, state_range::kThreshold);
  visit_number(visitor, name_ + ".budget", last_k_, state_range::entries_of(model_));
  caps_.visit(name_ + ".share", visitor);
}

}  // namespace topreduce::select
