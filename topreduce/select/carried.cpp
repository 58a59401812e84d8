// One threshold for the whole model, carried from step to step, so that a bucket can be cut the
// moment it arrives.
//
// The threshold of the next step is foreseen from a sample of this one (foresight.h): the k-th
// magnitude of what is left plus or minus a gradient like this one, times a bias that is steered
// slowly:
//
//   threshold = foreseen * bias,   bias *= (count / k)^gain,   bias = 1 when the count is far off
//
// Drops nothing: what stays below the threshold stays owed. Ours; Ok-Topk's reuse of thresholds
// (arXiv 2201.07598) is the nearest published relative.

#include <algorithm>
#include <cmath>

#include "topreduce/catalog.h"
#include "topreduce/select/foresight.h"

namespace topreduce::select {
namespace {

constexpr double kLeastBias = 0x1p-64;

class Carried final : public Selector {
 public:
  Carried(double gain, const Layout& layout) : gain_(gain), foresight_("carried", layout) {}

  void begin(const Budget& budget) override { foresight_.begin(budget); }

  void choose(const Pending& pending, SparseVector& selected, kernels::Seen& seen,
              double& look_seconds) override {
    foresight_.choose(pending, selected, seen, look_seconds);
  }

  void commit() override {
    const auto k = static_cast<double>(foresight_.budget().entries);
    const double count = foresight_.count();
    const bool near = foresight_.cut() > 0 && count > k / kFarOff && count < k * kFarOff;
    bias_ = near ? bias_ * std::pow(count / k, gain_) : 1;
    bias_ = std::clamp(bias_, kLeastBias, 1 / kLeastBias);
    const float foreseen = foresight_.sample().kth_magnitude(foresight_.budget().entries, 0);
    foresight_.commit(foreseen > 0 ? foreseen * bias_ : foresight_.cut());
  }

  bool works_on_device(Budget::Exchanges) const override { return true; }

  void visit(StateVisitor& visitor) override {
    foresight_.visit(visitor);
    visit_number(visitor, "carried.bias", bias_, {kLeastBias, 1 / kLeastBias});
  }

 private:
  double gain_;
  Foresight foresight_;
  double bias_ = 1;
};

}  // namespace

std::unique_ptr<Selector> make_carried(const Settings& settings, const Layout& layout) {
  return std::make_unique<Carried>(settings.number("gain"), layout);
}

}  // namespace topreduce::select
