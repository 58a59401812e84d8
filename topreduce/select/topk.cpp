// Exact top-k over the whole model: exactly k entries (fewer only if fewer are not zero), ties to
// the lower index.
//
// One pass collects every entry above last step's cut, lowered a little; the exact cut is then made
// among those few. Only if fewer than k were found is there a second pass, from a sampled cut.

#include <algorithm>
#include <cmath>

#include "topreduce/catalog.h"
#include "topreduce/floating.h"
#include "topreduce/select/sample.h"
#include "topreduce/select/strongest.h"
#include "topreduce/state_range.h"
#include "topreduce/stats.h"

namespace topreduce::select {
namespace {

constexpr double kLeastSlack = 0.03, kMostSlack = 0.5;

class TopK final : public Selector {
 public:
  void begin(const Budget& budget) override { budget_ = budget; }

  void choose(const CompensatedGradient& compensated, SparseVector& selected,
              kernels::Summary& summary, double& look_seconds) override {
    selected.clear();
    {
      Stopwatch watch(look_seconds);
      look(compensated, summary);
    }
    if (summary.finite()) next_cut_ = strongest_.finish(selected);
  }

  // The slack follows how far the cut moves from step to step, quickly up and slowly down.
  void commit() override {
    if (cut_ > 0 && next_cut_ > 0) {
      const double moved = std::abs(next_cut_ / cut_ - 1);
      slack_ = std::clamp(std::max(2 * moved, 0.9 * slack_), kLeastSlack, kMostSlack);
    }
    if (next_cut_ > 0) cut_ = next_cut_;
  }

  bool works_on_device(Budget::Exchanges) const override { return true; }

  void visit(StateVisitor& visitor) override {
    visit_number(visitor, "topk.cut", cut_, state_range::kThreshold);
    visit_number(visitor, "topk.slack", slack_, {kLeastSlack, kMostSlack});
  }

 private:
  static constexpr std::size_t kSampleSize = 1 << 16;

  void look(const CompensatedGradient& compensated, kernels::Summary& summary) {
    const std::size_t k = budget_.entries;
    if (k >= budget_.model) return collect(compensated, kNonZero, summary);
    if (cut_ > 0) {
      collect(compensated, to_magnitude(cut_ * (1 - slack_)), summary);
      if (strongest_.size() >= k || !summary.finite()) return;
    }
    sample_.begin(budget_.model, kSampleSize);
    sample_.take(compensated);
    const float guess = sample_.kth_magnitude(k, 4);
    collect(compensated, guess, summary);
    if (strongest_.size() < k && guess > kNonZero) collect(compensated, kNonZero, summary);
  }

  void collect(const CompensatedGradient& compensated, float floor, kernels::Summary& summary) {
    summary = {};
    strongest_.begin(budget_.entries, floor);
    strongest_.look(compensated, summary);
  }

  Budget budget_;
  Strongest strongest_;
  Sample sample_;
  double cut_ = 0;  // last step's k-th magnitude; 0 before the first
  double next_cut_ = 0;
  double slack_ = 0.1;
};

}  // namespace

std::unique_ptr<Selector> make_topk(const Settings&, const Layout&) {
  return std::make_unique<TopK>();
}

}  // namespace topreduce::select
