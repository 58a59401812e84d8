// Momentum before the choice, as in Deep Gradient Compression: what piles up is not the gradient
// but the velocity of SGD with momentum, so that an entry which waited arrives as if it had been
// applied all along. For an optimizer without momentum of its own.
//
//   velocity  = m velocity + gradient                   form=nesterov:  m (velocity + gradient)
//   unsent   += velocity                                                velocity + gradient
//   send unsent;  unsent -= settled;  velocity = 0 where something was settled (masking=on)
//
// Kept are velocity and base = unsent + m velocity; so unsent is base + scale * gradient, with
// scale 1 or 1 + m.
//
// Law, on each rank: unsent after = unsent before + velocity (+ gradient) - settled. Without
// masking all that was delivered and all that is unsent add up to the steps of dense SGD with
// momentum. A dense step delivers the velocity and masks nothing: it is a step of dense SGD with
// momentum. `owed` shows base: where the next step starts from.
//
// Lin, Han, Mao, Wang, Dally 2018, arXiv 1712.01887 (momentum correction, momentum factor masking).

#include "topreduce/catalog.h"
#include "topreduce/feedback/walk.h"

namespace topreduce::feedback {
namespace {

enum class Form { plain, nesterov };
enum class Masking { on, off };

class Momentum final : public Feedback {
 public:
  Momentum(float momentum, Form form, Masking masking, std::size_t entries)
      : momentum_(momentum),
        scale_(form == Form::plain ? 1 : 1 + momentum),
        push_(form == Form::plain ? 1 : momentum / (1 + momentum)),
        masking_(masking),
        base_(entries),
        velocity_(entries) {}

  std::span<const float> base() const override { return base_; }
  float scale() const override { return scale_; }
  bool keeps_gradients() const override { return true; }
  Drift drift() const override {
    return {velocity_, momentum_, push_,
            masking_ == Masking::on ? Drift::Sent::stop : Drift::Sent::go_on};
  }

  double commit(const CompensatedGradient& compensated, const exchange::Result& result, int ranks,
                float unit) override {
    const auto divisor = static_cast<float>(ranks);
    const bool whole = result.extent == exchange::Result::Extent::whole;
    const bool masks = masking_ == Masking::on && !whole;
    return sum_over_blocks(compensated, result, [&](const Block& block, Walk& walk) {
      double gone = 0;
      const std::size_t n = block.gradient.size();
      const std::span<float> unsent(base_.data() + block.offset, n);
      const std::span<float> velocity(velocity_.data() + block.offset, n);
      for (std::size_t i = 0; i < n; ++i) {
        const float scaled = compensated.scale() * block.gradient[i];
        const float lasts = momentum_ * velocity[i], pushed = push_ * scaled;
        velocity[i] = lasts + pushed;
      }
      kernels::absorb(unsent, block.gradient, compensated.scale());
      walk.settled(
          block, [&](std::size_t i) { return unsent[i]; },
          [&](std::size_t i, float value) {
            const double x = unsent[i];
            unsent[i] -= value;
            gone += x * x - static_cast<double>(unsent[i]) * unsent[i];
            if (masks && value != 0) velocity[i] = 0;
          });
      walk.sum(block,
               [&](std::size_t i, float value) { block.gradient[i] = value / divisor * unit; });
      for (std::size_t i = 0; i < n; ++i) {
        const float lasts = momentum_ * velocity[i];
        unsent[i] += lasts;  // from here on: base
      }
      return gone;
    });
  }

  void visit(StateVisitor& visitor) override {
    visitor.entries("momentum.base", base_);
    visitor.entries("momentum.velocity", velocity_);
  }

 private:
  float momentum_;
  float scale_;  // of the gradient in what is unsent
  float push_;   // of that, in the velocity
  Masking masking_;
  Zeros<float> base_;
  Zeros<float> velocity_;
};

}  // namespace

std::unique_ptr<Feedback> make_momentum(const Settings& settings, const Layout& layout) {
  return std::make_unique<Momentum>(static_cast<float>(settings.number("momentum")),
                                    settings.text("form") == "plain" ? Form::plain : Form::nesterov,
                                    settings.text("masking") == "on" ? Masking::on : Masking::off,
                                    layout.size());
}

}  // namespace topreduce::feedback
