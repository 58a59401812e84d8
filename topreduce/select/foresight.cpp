#include "topreduce/select/foresight.h"

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

void Foresight::begin(const Budget& budget) {
  budget_ = budget;
  sample_.begin(budget.model, kSampleSize);
  const auto k = static_cast<double>(budget.entries);
  cut_ = to_magnitude(threshold_ * std::pow(last_k_ / k, kSteepness));
  if (budget.entries >= budget.model) cut_ = kNonZero;
  caps_.begin(budget, cut_ > 0 ? Caps::Threshold::known : Caps::Threshold::unknown);
}

void Foresight::choose(const Pending& pending, SparseVector& selected, kernels::Seen& seen,
                       double& look_seconds) {
  selected.clear();
  if (pending.device() != nullptr) {
    Stopwatch watch(look_seconds);
    seen = pending.survey();
    if (seen.finite()) choose_on_device(pending, selected);
    return;
  }
  seen = {};
  for (const Segment& segment : pending.segments()) {
    const kernels::Terms terms = pending.terms(segment);
    strongest_.begin(caps_[segment.parameter], cut_);
    look(segment, pending, seen, look_seconds);
    if (!seen.finite()) return;
    const std::size_t before = selected.size();
    const float weakest = strongest_.finish(selected);
    caps_.note(segment.parameter, selected.size() - before);
    if (cut_ == 0) {
      const bool none = selected.size() == before;
      sample_.foresee(segment.offset, terms, none ? kNever : weakest, pending.drift());
    }
  }
}

void Foresight::choose_on_device(const Pending& pending, SparseVector& selected) {
  caps_.choose_on_device(pending, cut_, selected);
  cuts_.clear();
  std::size_t next = 0;
  for (const Segment& segment : pending.segments()) {
    float weakest = kNever;
    const std::size_t end = segment.start + segment.size();
    for (; next < selected.size() && selected.indices[next] < end; ++next) {
      weakest = std::min(weakest, std::abs(selected.values[next]));
    }
    cuts_.push_back(cut_ > 0 ? cut_ : weakest);
  }
  sample_.foresee_on_device(pending, cuts_);
}

void Foresight::look(const Segment& segment, const Pending& pending, kernels::Seen& seen,
                     double& look_seconds) {
  Stopwatch watch(look_seconds);
  strongest_.look(pending.terms(segment), segment.start, seen, pending.threads(),
                  [&](std::size_t start, const kernels::Terms& block) {
                    if (cut_ == 0) return;
                    sample_.foresee(segment.offset + start, block, cut_, pending.drift());
                  });
}

void Foresight::commit(double threshold) {
  threshold_ = std::min(threshold, state_range::kThreshold.most);
  last_k_ = static_cast<double>(budget_.entries);
  caps_.commit();
}

void Foresight::visit(StateVisitor& visitor) {
  visit_number(visitor, name_ + ".threshold", threshold_, state_range::kThreshold);
  visit_number(visitor, name_ + ".budget", last_k_, state_range::entries_of(model_));
  caps_.visit(name_ + ".share", visitor);
}

}  // namespace topreduce::select
