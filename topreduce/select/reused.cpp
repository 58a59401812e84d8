// A threshold that is exact every `period` steps and reused between, as in Ok-Topk.
//
//   step   0      1      2    ...   31     32
//          exact  reused, a little higher  exact
//                 or lower by the count
//
// Too few entries (below `low` budgets) lower the threshold for the next step by `factor`, too many
// (above `high`) raise it. Within a step that sees the whole model at once a guard raises it up to
// five times by 3 % while the count exceeds 4/3 of the budget, and the strongest two budgets are
// the most that is sent. When buckets come one by one there is no count yet: caps take the guard's
// place, and the exact k-th magnitude of a step serves the next one.
// A count that is off by a factor of two asks for an exact step at once; the published code waits.
//
// Li and Hoefler 2022, arXiv 2201.07598; bands and factors as in its code for VGG-16.

#include <algorithm>
#include <cmath>

#include "topreduce/catalog.h"
#include "topreduce/floating.h"
#include "topreduce/select/caps.h"
#include "topreduce/select/strongest.h"
#include "topreduce/stats.h"

namespace topreduce::select {
namespace {

struct Control {
  std::uint64_t period;
  double low, high, factor;
  double guard, guard_factor;
  std::uint64_t guard_passes;
};

class Reused final : public Selector {
 public:
  Reused(const Control& control, const Layout& layout)
      : control_(control), model_(std::max<std::size_t>(1, layout.size())), caps_(layout) {}

  void begin(const Budget& budget) override {
    budget_ = budget;
    const auto k = static_cast<double>(budget.entries);
    cut_ = threshold_ * std::pow(last_k_ / k, kSteepness);
    exact_ = due_ != 0 || budget.step % control_.period == 0;
    if (whole_model()) return;
    const bool known = cut_ > 0 || sends_all();
    caps_.begin(budget, known ? Caps::Threshold::known : Caps::Threshold::unknown);
    ranking_.begin(budget.entries, to_magnitude(cut_ / 2));
  }

  void choose(const CompensatedGradient& compensated, SparseVector& selected,
              kernels::Summary& summary, double& look_seconds) override {
    selected.clear();
    if (!whole_model()) return choose_in_bucket(compensated, selected, summary, look_seconds);
    if (exact_ || sends_all()) return choose_exactly(compensated, selected, summary, look_seconds);
    {
      Stopwatch watch(look_seconds);
      const auto most = static_cast<std::size_t>(kFarOff) * budget_.entries;
      look(compensated, most, to_magnitude(cut_), summary);
    }
    if (!summary.finite()) return;
    strongest_.finish(selected);
    guard(selected);
    count_ = static_cast<double>(selected.size());
  }

  /// An exact step looks twice.
  bool lets_go() const override { return !whole_model() && (!exact_ || sends_all()); }

  void commit() override {
    if (!whole_model()) {
      count_ = caps_.sent();
      caps_.commit();
    }
    if (sends_all()) return;
    last_k_ = static_cast<double>(budget_.entries);
    if (exact_) return adopt_exact();
    threshold_ = cut_;
    if (count_ < control_.low * last_k_) threshold_ /= control_.factor;
    if (count_ > control_.high * last_k_) threshold_ *= control_.factor;
    threshold_ = std::min(threshold_, state_range::kThreshold.most);
    due_ = count_ < last_k_ / kFarOff || count_ >= last_k_ * kFarOff ? 1 : 0;
  }

  bool works_on_device(Budget::Exchanges) const override { return true; }

  void visit(StateVisitor& visitor) override {
    visit_number(visitor, "reused.threshold", threshold_, state_range::kThreshold);
    visit_number(visitor, "reused.budget", last_k_, state_range::entries_of(model_));
    visit_number(visitor, "reused.due", due_, state_range::kFlag);
    caps_.visit("reused.share", visitor);
  }

 private:
  bool whole_model() const { return budget_.exchanges == Budget::Exchanges::one; }
  bool sends_all() const { return budget_.entries >= budget_.model; }

  void look(const CompensatedGradient& compensated, std::size_t limit, float floor,
            kernels::Summary& summary) {
    summary = {};
    strongest_.begin(limit, floor);
    strongest_.look(compensated, summary);
  }

  void choose_exactly(const CompensatedGradient& compensated, SparseVector& selected,
                      kernels::Summary& summary, double& look_seconds) {
    {
      Stopwatch watch(look_seconds);
      const float floor = sends_all() ? kNonZero : to_magnitude(cut_ / 2);
      look(compensated, budget_.entries, floor, summary);
      if (summary.finite() && strongest_.size() < budget_.entries && floor > kNonZero) {
        look(compensated, budget_.entries, kNonZero, summary);
      }
    }
    if (!summary.finite()) return;
    weakest_ = strongest_.finish(selected);
    ranked_ = selected.size();
  }

  // Drops what a raised threshold leaves out.
  void guard(SparseVector& selected) {
    const double limit = control_.guard * static_cast<double>(budget_.entries);
    for (std::uint64_t pass = 0; pass < control_.guard_passes; ++pass) {
      const auto cut = to_magnitude(cut_);
      const auto above = std::ranges::count_if(
          selected.values, [cut](float value) { return std::abs(value) >= cut; });
      if (static_cast<double>(above) <= limit) break;
      cut_ *= control_.guard_factor;
    }
    const auto cut = to_magnitude(cut_);
    std::size_t kept = 0;
    for (std::size_t i = 0; i < selected.size(); ++i) {
      if (std::abs(selected.values[i]) < cut) continue;
      selected.indices[kept] = selected.indices[i];
      selected.values[kept++] = selected.values[i];
    }
    selected.resize(kept);
  }

  void choose_in_bucket(const CompensatedGradient& compensated, SparseVector& selected,
                        kernels::Summary& summary, double& look_seconds) {
    const float cut = sends_all() ? kNonZero : to_magnitude(cut_);
    if (compensated.device() != nullptr) {
      Stopwatch watch(look_seconds);
      const bool ranks = exact_ && !sends_all();
      caps_.announce(compensated, cut);
      if (ranks) ranking_.announce(*compensated.device());
      summary = compensated.summarize();
      if (!summary.finite()) return;
      caps_.choose_on_device(compensated, cut, selected);
      if (ranks) ranking_.look_on_device(*compensated.device());
      return;
    }
    summary = {};
    for (const Segment& segment : compensated.segments()) {
      const kernels::Terms terms = compensated.terms(segment);
      {
        Stopwatch watch(look_seconds);
        strongest_.begin(caps_[segment.parameter], cut);
        strongest_.look(terms, segment.start, summary, compensated.threads(),
                        [&](std::size_t start, const kernels::Terms& block) {
                          if (lets_go()) compensated.let_go(segment, start, block.size());
                        });
        kernels::Summary again;
        if (exact_ && !sends_all() && summary.finite()) {
          ranking_.look(terms, segment.start, again, compensated.threads());
        }
      }
      if (!summary.finite()) continue;
      const std::size_t before = selected.size();
      strongest_.finish(selected);
      caps_.note(segment.parameter, selected.size() - before);
    }
  }

  // The exact k-th magnitude, if k entries were found; else the search goes on in the next step.
  void adopt_exact() {
    if (!whole_model()) {
      scratch_.clear();
      weakest_ = ranking_.finish(scratch_);
      ranked_ = scratch_.size();
    }
    due_ = ranked_ < budget_.entries ? 1 : 0;
    threshold_ = due_ == 0 ? weakest_ : whole_model() ? cut_ : cut_ / 2;
  }

  Control control_;
  std::size_t model_;  // entries
  Budget budget_;
  Strongest strongest_;
  Strongest ranking_;  // over all buckets of a step: its k-th magnitude
  SparseVector scratch_;
  Caps caps_;
  double cut_ = 0;  // this step's threshold; 0 if none is known yet
  bool exact_ = true;
  float weakest_ = 0;       // of an exact step: the weakest ...
  std::size_t ranked_ = 0;  // ... of so many
  double count_ = 0;
  double threshold_ = 0;  // for the next step
  double last_k_ = 1;
  double due_ = 1;  // 1: the next step must be exact
};

}  // namespace

std::unique_ptr<Selector> make_reused(const Settings& settings, const Layout& layout) {
  const Control control{settings.integer("period"),      settings.number("low"),
                        settings.number("high"),         settings.number("factor"),
                        settings.number("guard"),        settings.number("guard_factor"),
                        settings.integer("guard_passes")};
  return std::make_unique<Reused>(control, layout);
}

}  // namespace topreduce::select
