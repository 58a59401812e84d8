// One threshold for the whole model, carried from step to step, so that a bucket can be cut the
// moment it arrives.
//
// The threshold of the next step is foreseen from a sample of this one: the k-th magnitude of what
// is left plus or minus a gradient like this one, times a bias that is steered slowly:
//
//   threshold = foreseen * bias,   bias *= (count / k)^gain,   bias = 1 when the count is far off
//
// A stale threshold must not send everything: each parameter has a cap (caps.h), above which it
// sends its strongest entries.
// The first step knows no threshold: each parameter sends its share by size.

#include <algorithm>
#include <cmath>
#include <limits>

#include "topreduce/catalog.h"
#include "topreduce/select/caps.h"
#include "topreduce/select/sample.h"
#include "topreduce/select/strongest.h"
#include "topreduce/stats.h"

namespace topreduce::select {
namespace {

constexpr std::size_t kSampleSize = 1 << 17;
constexpr std::size_t kBlock = 1 << 14;  // looked at and sampled while it is in the cache
constexpr double kFarOff = 2;            // counts beyond this factor of the budget are far off
constexpr double kSteepness = 0.3;       // threshold ~ budget^-0.3, when the budget itself changes

class Carried final : public Selector {
 public:
  Carried(double gain, const Layout& layout) : gain_(gain), caps_(layout) {}

  void begin(const Budget& budget) override {
    budget_ = budget;
    sample_.begin(budget.model, kSampleSize);
    const auto k = static_cast<double>(budget.entries);
    cut_ = static_cast<float>(threshold_ * std::pow(last_k_ / k, kSteepness));
    if (budget.entries >= budget.model) cut_ = kNonZero;
    caps_.begin(budget, cut_ > 0 ? Caps::Threshold::known : Caps::Threshold::unknown);
  }

  void choose(const Pending& pending, SparseVector& selected, kernels::Seen& seen,
              double& look_seconds) override {
    selected.clear();
    seen = {};
    for (const Segment& segment : pending.segments()) {
      const kernels::Terms terms = pending.terms(segment);
      strongest_.begin(caps_[segment.parameter], cut_);
      look(segment, terms, seen, look_seconds);
      if (!seen.finite()) return;
      const std::size_t before = selected.size();
      const float weakest = strongest_.finish(selected);
      caps_.note(segment.parameter, selected.size() - before);
      if (cut_ == 0) {
        const bool none = selected.size() == before;
        sample_.foresee(segment.offset, terms, none ? kNever : weakest);
      }
    }
  }

  void commit() override {
    const auto k = static_cast<double>(budget_.entries);
    const double count = caps_.sent();
    const bool near = cut_ > 0 && count > k / kFarOff && count < k * kFarOff;
    bias_ = near ? bias_ * std::pow(count / k, gain_) : 1;
    const float foreseen = sample_.kth_magnitude(budget_.entries, 0);
    threshold_ = foreseen > 0 ? foreseen * bias_ : cut_;
    last_k_ = k;
    caps_.commit();
  }

  void visit(StateVisitor& visitor) override {
    visitor.number("carried.threshold", threshold_);
    visitor.number("carried.bias", bias_);
    visitor.number("carried.budget", last_k_);
    caps_.visit("carried.share", visitor);
  }

 private:
  static constexpr float kNever = std::numeric_limits<float>::infinity();

  void look(const Segment& segment, const kernels::Terms& terms, kernels::Seen& seen,
            double& look_seconds) {
    Stopwatch watch(look_seconds);
    for (std::size_t start = 0; start < terms.size(); start += kBlock) {
      const auto block = terms.part(start, std::min(kBlock, terms.size() - start));
      strongest_.look(block, segment.start + static_cast<Index>(start), seen);
      if (cut_ > 0) sample_.foresee(segment.offset + start, block, cut_);
    }
  }

  double gain_;
  Budget budget_;
  float cut_ = 0;  // this step's threshold; 0 if none is known yet
  Caps caps_;
  double threshold_ = 0;  // for the next step
  double bias_ = 1;
  double last_k_ = 1;
  Strongest strongest_;
  Sample sample_;
};

}  // namespace

std::unique_ptr<Selector> make_carried(const Settings& settings, const Layout& layout) {
  return std::make_unique<Carried>(settings.number("gain"), layout);
}

}  // namespace topreduce::select
