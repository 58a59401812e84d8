// One threshold for the whole model, carried from step to step and steered towards the budget, so
// that a bucket can be cut the moment it arrives.
//
//   count near k      threshold *= (count / k)^gain
//   count far off     threshold  = the sampled k-th magnitude of this step, for the next one
//
// A stale threshold must not send everything: each parameter has a cap, twice its recent share of
// the budget plus its share by size, together three times the budget. Above its cap a parameter
// sends its strongest entries. Caps belong to parameters, so the bucket cut does not matter; a
// fraction of an entry is rounded by a shared random phase, so that no small parameter starves.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "topreduce/catalog.h"
#include "topreduce/random.h"
#include "topreduce/select/sample.h"
#include "topreduce/select/strongest.h"
#include "topreduce/stats.h"

namespace topreduce::select {
namespace {

constexpr std::size_t kSampleSize = 1 << 16;
constexpr double kFarOff = 2;       // counts beyond this factor of the budget are far off
constexpr double kSteepness = 0.3;  // threshold ~ budget^-0.3, when the budget itself changes

class Carried final : public Selector {
 public:
  Carried(double gain, const Layout& layout)
      : gain_(gain), shares_(layout.count()), caps_(layout.count()), sent_(layout.count()) {
    for (const Parameter& parameter : layout.parameters()) {
      sizes_.push_back(static_cast<double>(parameter.size));
    }
  }

  void begin(const Budget& budget) override {
    budget_ = budget;
    sample_.begin(budget.model, kSampleSize);
    std::ranges::fill(sent_, 0.0);
    const double k = static_cast<double>(budget.entries);
    cut_ = threshold_ > 0 ? threshold_ * std::pow(last_k_ / k, kSteepness) : 0;
    if (budget.entries >= budget.model) cut_ = kNonZero;
    set_caps(k);
  }

  void choose(const Pending& pending, SparseVector& selected, kernels::Seen& seen,
              double& look_seconds) override {
    selected.clear();
    seen = {};
    for (const Segment& segment : pending.segments()) {
      const kernels::Terms terms = pending.terms(segment);
      strongest_.begin(caps_[segment.parameter], static_cast<float>(cut_));
      {
        Stopwatch watch(look_seconds);
        strongest_.look(terms, segment.start, seen);
        sample_.take(segment, terms);
      }
      if (!seen.finite()) return;
      const std::size_t before = selected.size();
      strongest_.finish(selected);
      sent_[segment.parameter] = static_cast<double>(selected.size() - before);
    }
  }

  void commit() override {
    const double k = static_cast<double>(budget_.entries);
    const double count = std::accumulate(sent_.begin(), sent_.end(), 0.0);
    if (cut_ > 0 && count > k / kFarOff && count < k * kFarOff) {
      threshold_ = cut_ * std::pow(count / k, gain_);
    } else if (const float sampled = sample_.kth_magnitude(budget_.entries, 0); sampled > 0) {
      threshold_ = sampled;
    } else {
      threshold_ = cut_;
    }
    last_k_ = k;
    for (std::size_t p = 0; p < shares_.size(); ++p) shares_[p] = (shares_[p] + sent_[p]) / 2;
  }

  void visit(StateVisitor& visitor) override {
    visitor.number("carried.threshold", threshold_);
    visitor.number("carried.budget", last_k_);
    visitor.parameters("carried.share", shares_);
  }

 private:
  void set_caps(double k) {
    const double sent = std::accumulate(shares_.begin(), shares_.end(), 0.0);
    const bool known = cut_ > 0;
    const double by_share = known && sent > 0 ? 2 * k / sent : 0;
    const double times_size = !known ? 1 : sent > 0 ? 1 : 3;
    const double by_size =
        times_size * k / static_cast<double>(std::max<std::size_t>(1, budget_.model));
    // The phase keeps off 0 and 1, where the rounding of a long sum could add an entry.
    double end =
        0.001 +
        0.998 * RandomStream(budget_.seed, budget_.step, RandomStream::Purpose::caps).unit(0);
    for (std::size_t p = 0; p < caps_.size(); ++p) {
      const double start = end;
      end += by_share * shares_[p] + by_size * sizes_[p];
      caps_[p] = static_cast<std::size_t>(std::floor(end) - std::floor(start));
    }
  }

  double gain_;
  Budget budget_;
  double cut_ = 0;                 // this step's threshold; 0 if none is known yet
  std::vector<double> sizes_;      // entries of each parameter
  std::vector<double> shares_;     // what each sent lately
  std::vector<std::size_t> caps_;  // the most each may send in this step
  std::vector<double> sent_;       // what each sends in this step
  double threshold_ = 0;
  double last_k_ = 1;
  Strongest strongest_;
  Sample sample_;
};

}  // namespace

std::unique_ptr<Selector> make_carried(const Settings& settings, const Layout& layout) {
  return std::make_unique<Carried>(settings.number("gain"), layout);
}

}  // namespace topreduce::select
