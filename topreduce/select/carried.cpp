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
#include "topreduce/select/threshold_predictor.h"

namespace topreduce::select {
namespace {

constexpr double kLeastBias = 0x1p-64;

class Carried final : public Selector {
 public:
  Carried(double gain, const Layout& layout) : gain_(gain), predictor_("carried", layout) {}

  void begin(const Budget& budget) override { predictor_.begin(budget); }

  void choose(const CompensatedGradient& compensated, SparseVector& selected,
              kernels::Summary& summary, double& look_seconds) override {
    predictor_.choose(compensated, selected, summary, look_seconds);
  }

  bool lets_go() const override { return predictor_.lets_go(); }

  void commit() override {
    const auto k = static_cast<double>(predictor_.budget().entries);
    const double count = predictor_.count();
    const bool near = predictor_.cut() > 0 && count > k / kFarOff && count < k * kFarOff;
    bias_ = near ? bias_ * std::pow(count / k, gain_) : 1;
    bias_ = std::clamp(bias_, kLeastBias, 1 / kLeastBias);
    const float foreseen = predictor_.sample().kth_magnitude(predictor_.budget().entries, 0);
    predictor_.commit(foreseen > 0 ? foreseen * bias_ : predictor_.cut());
  }

  bool works_on_device(Budget::Exchanges) const override { return true; }

  void visit(StateVisitor& visitor) override {
    predictor_.visit(visitor);
    visit_number(visitor, "carried.bias", bias_, {kLeastBias, 1 / kLeastBias});
  }

 private:
  double gain_;
  ThresholdPredictor predictor_;
  double bias_ = 1;
};

}  // namespace

std::unique_ptr<Selector> make_carried(const Settings& settings, const Layout& layout) {
  return std::make_unique<Carried>(settings.number("gain"), layout);
}

}  // namespace topreduce::select
