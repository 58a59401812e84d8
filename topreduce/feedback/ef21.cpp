// EF21: every rank keeps an estimate of its gradient and sends only how far off it is; what
// everyone applies is the mean of the estimates.
//
//   send      gradient - estimate           (so base = -estimate)
//   estimate += settled                     on each rank
//   mean     += sum / ranks                 the same on all ranks; the gradient becomes this
//
// Law: the mean over the ranks of their estimates is the gradient that everyone applies. Nothing is
// owed: what was not sent is part of the next difference. `owed_norm` is the distance from the
// gradient to the estimate after the step, `kept_energy` the share of its square that was closed.
//
// A step that sends everything sends plain gradients, and the estimates start anew from them; the
// first step must be one. If all ranks always send the same entries, the mean can stand for every
// rank's own estimate and the mean does not change (only averages matter): one buffer, the same on
// all ranks, and the entries sent are simply overwritten with the mean of their gradients.
//
// Richtarik, Sokolov, Fatkhullin 2021, arXiv 2106.05203.

#include "topreduce/catalog.h"
#include "topreduce/feedback/walk.h"
#include "topreduce/state_range.h"

namespace topreduce::feedback {
namespace {

class EF21 final : public Feedback {
 public:
  EF21(std::size_t entries, Choice choice)
      : base_(entries), mean_(choice == Choice::alone ? entries : 0) {}

  std::span<const float> base() const override { return base_; }
  std::span<const float> owed() const override { return {}; }
  bool is_estimate() const override { return true; }
  bool started() const override { return started_ != 0 || base_.empty(); }
  bool keeps_gradients() const override { return true; }
  HeldMean held_mean() const override {
    return mean_.empty() ? HeldMean{base_, -1} : HeldMean{mean_, 1};
  }

  double commit(const CompensatedGradient& compensated, const exchange::Result& result, int ranks,
                float unit) override {
    const auto divisor = static_cast<float>(ranks);
    const bool own = !mean_.empty();
    started_ = 1;
    return sum_over_blocks(compensated, result, [&](const Block& block, Walk& walk) {
      double gone = 0;
      const std::size_t n = block.gradient.size();
      const std::span<float> base(base_.data() + block.offset, n);
      const std::span<float> mean = own ? std::span(mean_.data() + block.offset, n) : base;
      if (compensated.plain()) {
        std::ranges::fill(base, 0.0f);
        std::ranges::fill(mean, 0.0f);
      }
      const auto had = [&](std::size_t i) {
        const float scaled = compensated.scale() * block.gradient[i];
        return base[i] + scaled;
      };
      walk.settled(block, had, [&](std::size_t i, float value) {
        const double x = had(i), left = x - value;
        gone += x * x - left * left;
        if (own) base[i] -= value;
      });
      walk.sum(block,
               [&](std::size_t i, float value) { mean[i] += (own ? value : -value) / divisor; });
      for (std::size_t i = 0; i < n; ++i) block.gradient[i] = (own ? mean[i] : 0 - mean[i]) * unit;
      return gone;
    });
  }

  void visit(StateVisitor& visitor) override {
    visit_number(visitor, "ef21.started", started_, state_range::kFlag);
    visitor.entries("ef21.base", base_);
    if (!mean_.empty()) visitor.entries("ef21.mean", mean_);
  }

 private:
  double started_ = 0;
  Zeros<float> base_;  // minus the estimate: this rank's own, or the mean for all
  Zeros<float> mean_;  // only beside own estimates
};

}  // namespace

std::unique_ptr<Feedback> make_ef21(const Settings& settings, const Layout& layout) {
  return std::make_unique<EF21>(layout.size(), settings.choice());
}

}  // namespace topreduce::feedback
