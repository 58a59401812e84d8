// One threshold for the whole model, carried from step to step, so that a bucket can be cut the
// moment it arrives.
//
// The threshold of the next step is foreseen from a sample of this one: the k-th magnitude of what
// is left plus or minus a gradient like this one, times a bias that is steered slowly:
//
//   threshold = foreseen * bias,   bias *= (count / k)^gain,   bias = 1 when the count is far off
//
// A stale threshold must not send everything: each parameter has a cap, one entry plus twice its
// recent share of the budget plus a share by size, together three times the budget. Above its cap a
// parameter sends its strongest entries. Caps belong to parameters, so the bucket cut does not
// matter; a fraction of an entry is rounded by a shared random phase, so that no small parameter
// starves. The first step knows no threshold: each parameter sends its share by size.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "topreduce/catalog.h"
#include "topreduce/random.h"
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
  Carried(double gain, const Layout& layout)
      : gain_(gain), shares_(layout.count()), caps_(layout.count()), sent_(layout.count()) {
    for (const Parameter& parameter : layout.parameters()) {
      sizes_.push_back(parameter.size);
    }
  }

  void begin(const Budget& budget) override {
    budget_ = budget;
    sample_.begin(budget.model, kSampleSize);
    std::ranges::fill(sent_, 0.0);
    const auto k = static_cast<double>(budget.entries);
    cut_ = static_cast<float>(threshold_ * std::pow(last_k_ / k, kSteepness));
    set_caps(k);
    if (budget.entries >= budget.model) {  // everything may go
      cut_ = kNonZero;
      std::ranges::copy(sizes_, caps_.begin());
    }
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
      sent_[segment.parameter] = static_cast<double>(selected.size() - before);
      if (cut_ == 0) {
        const bool none = selected.size() == before;
        sample_.foresee(segment.offset, terms, none ? kNever : weakest);
      }
    }
  }

  void commit() override {
    const auto k = static_cast<double>(budget_.entries);
    const double count = std::accumulate(sent_.begin(), sent_.end(), 0.0);
    const bool near = cut_ > 0 && count > k / kFarOff && count < k * kFarOff;
    bias_ = near ? bias_ * std::pow(count / k, gain_) : 1;
    const float foreseen = sample_.kth_magnitude(budget_.entries, 0);
    threshold_ = foreseen > 0 ? foreseen * bias_ : cut_;
    last_k_ = k;
    for (std::size_t p = 0; p < shares_.size(); ++p) shares_[p] = (shares_[p] + sent_[p]) / 2;
  }

  void visit(StateVisitor& visitor) override {
    visitor.number("carried.threshold", threshold_);
    visitor.number("carried.bias", bias_);
    visitor.number("carried.budget", last_k_);
    visitor.parameters("carried.share", shares_);
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

  // One entry for each parameter (as far as half the budget goes), twice its recent share, and the
  // rest by size; k in all in the first step, 3 k later.
  void set_caps(double k) {
    const double recent = std::accumulate(shares_.begin(), shares_.end(), 0.0);
    const double by_share = cut_ > 0 && recent > 0 ? 2 * k / recent : 0;
    const auto parameters = static_cast<double>(std::max<std::size_t>(1, caps_.size()));
    const double each = std::min(1.0, k / 2 / parameters);
    const double rest = (cut_ > 0 ? 3 * k : k) - by_share * recent - each * parameters;
    const double by_size = rest / std::max(1.0, static_cast<double>(budget_.model));
    // The phase keeps off 0 and 1, where the rounding of a long sum could add an entry.
    const RandomStream stream(budget_.seed, budget_.step, RandomStream::Purpose::caps);
    double end = 0.001 + 0.998 * stream.unit(0);
    for (std::size_t p = 0; p < caps_.size(); ++p) {
      const double start = end;
      end += each + by_share * shares_[p] + by_size * static_cast<double>(sizes_[p]);
      caps_[p] = static_cast<std::size_t>(std::floor(end) - std::floor(start));
    }
  }

  double gain_;
  Budget budget_;
  float cut_ = 0;                   // this step's threshold; 0 if none is known yet
  std::vector<std::size_t> sizes_;  // entries of each parameter
  std::vector<double> shares_;      // what each sent lately
  std::vector<std::size_t> caps_;   // the most each may send in this step
  std::vector<double> sent_;        // what each sends in this step
  double threshold_ = 0;            // for the next step
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
