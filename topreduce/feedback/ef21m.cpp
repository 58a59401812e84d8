// EF21 with momentum (EF21-SGDM): as ef21, but the estimate follows a running mean h of the rank's
// gradients, so that the noise of small batches is not chased.
//
//   h         = (1 - eta) h + eta gradient
//   send      h - estimate                  (so base = (1 - eta) h - estimate, scale = eta)
//   estimate += settled                     on each rank
//   mean     += sum / ranks                 the same on all ranks; the gradient becomes this
//
// h itself is not kept: what is sent plus the estimate is h.
//
// Law: the mean over the ranks of their estimates is the gradient that everyone applies. Nothing is
// owed; `owed_norm` is the distance from h to the estimate after the step. A step that sends
// everything sends plain gradients, and h and the estimates start anew from them; the first step
// must be one. If all ranks always send the same entries, the mean stands for every rank's own
// estimate: two buffers instead of three, and the mean does not change.
//
// Fatkhullin, Tyurin, Richtarik 2023, arXiv 2305.15155.

#include "topreduce/catalog.h"
#include "topreduce/feedback/walk.h"
#include "topreduce/state_range.h"

namespace topreduce::feedback {
namespace {

class EF21M final : public Feedback {
 public:
  EF21M(float eta, std::size_t entries, Choice choice)
      : eta_(eta),
        base_(entries),
        mean_(entries),
        estimate_(choice == Choice::alone ? entries : 0) {}

  std::span<const float> base() const override { return base_; }
  float scale() const override { return eta_; }
  std::span<const float> owed() const override { return {}; }
  bool is_estimate() const override { return true; }
  bool started() const override { return started_ != 0 || base_.empty(); }
  bool keeps_gradients() const override { return true; }
  HeldMean held_mean() const override { return {mean_, 1}; }

  double commit(const CompensatedGradient& compensated, const exchange::Result& result, int ranks,
                float unit) override {
    const auto divisor = static_cast<float>(ranks);
    const float keep = 1 - eta_;
    const bool own = !estimate_.empty();
    started_ = 1;
    return sum_over_blocks(compensated, result, [&](const Block& block, Walk& walk) {
      double gone = 0;
      const std::size_t n = block.gradient.size();
      const std::span<float> base(base_.data() + block.offset, n);
      const std::span<float> mean(mean_.data() + block.offset, n);
      const std::span<float> estimate = own ? std::span(estimate_.data() + block.offset, n) : mean;
      if (compensated.plain()) {
        for (const auto& part : {base, mean, estimate}) std::ranges::fill(part, 0.0f);
      }
      kernels::absorb(base, block.gradient, compensated.scale());
      const std::span<float> h = block.gradient;  // its memory is free until the end
      for (std::size_t i = 0; i < n; ++i) h[i] = base[i] + estimate[i];
      walk.settled(
          block, [&](std::size_t i) { return base[i]; },
          [&](std::size_t i, float value) {
            const double x = base[i], left = x - value;
            gone += x * x - left * left;
            if (own) estimate[i] += value;
          });
      walk.sum(block, [&](std::size_t i, float value) { mean[i] += value / divisor; });
      for (std::size_t i = 0; i < n; ++i) {
        const float kept = keep * h[i];
        base[i] = kept - estimate[i];
        block.gradient[i] = mean[i] * unit;
      }
      return gone;
    });
  }

  void visit(StateVisitor& visitor) override {
    visit_number(visitor, "ef21m.started", started_, state_range::kFlag);
    visitor.entries("ef21m.base", base_);
    visitor.entries("ef21m.mean", mean_);
    if (!estimate_.empty()) visitor.entries("ef21m.estimate", estimate_);
  }

 private:
  float eta_;
  double started_ = 0;
  Zeros<float> base_;
  Zeros<float> mean_;
  Zeros<float> estimate_;  // this rank's own; empty if the mean stands for it
};

}  // namespace

std::unique_ptr<Feedback> make_ef21m(const Settings& settings, const Layout& layout) {
  return std::make_unique<EF21M>(static_cast<float>(settings.number("eta")), layout.size(),
                                 settings.choice());
}

}  // namespace topreduce::feedback
