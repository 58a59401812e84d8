// Error feedback: what was not settled is added to the next gradient.
// Law, on each rank: owed after = owed before + gradient - settled.
// Seide et al. 2014; Stich et al. 2018; Karimireddy et al. 2019 (arXiv 1901.09847).

#include "topreduce/catalog.h"
#include "topreduce/feedback/blocks.h"

namespace topreduce::feedback {
namespace {

class Residual final : public Feedback {
 public:
  explicit Residual(std::size_t entries) : owed_(entries) {}

  std::span<const float> base() const override { return owed_; }

  double commit(const Pending& pending, const exchange::Delivery& delivery, int ranks,
                float unit) override {
    const auto divisor = static_cast<float>(ranks);
    double gone = 0;
    Cursor settled(delivery.settled), sum(delivery.sum);
    for_each_block(pending.segments(), [&](const Block& block) {
      const std::span<float> owed(owed_.data() + block.offset, block.gradient.size());
      kernels::absorb(owed, block.gradient, pending.scale());
      const auto settle = [&](std::size_t i, float value) {
        const double x = owed[i];
        owed[i] -= value;
        gone += x * x - static_cast<double>(owed[i]) * owed[i];
      };
      const auto apply = [&](std::size_t i, float value) {
        block.gradient[i] = value / divisor * unit;
      };
      if (delivery.extent == exchange::Delivery::Extent::whole) {
        const bool all = delivery.dense_settled.empty();
        for (std::size_t i = 0; i < owed.size(); ++i) {
          settle(i, all ? owed[i] : delivery.dense_settled[block.start + i]);
          apply(i, delivery.dense_sum[block.start + i]);
        }
        return;
      }
      settled.advance(block.start, block.end, settle);
      sum.advance(block.start, block.end, apply);
    });
    return gone;
  }

  void visit(StateVisitor& visitor) override { visitor.entries("owed", owed_); }

 private:
  Zeros<float> owed_;
};

}  // namespace

std::unique_ptr<Feedback> make_residual(const Settings&, const Layout& layout) {
  return std::make_unique<Residual>(layout.size());
}

}  // namespace topreduce::feedback
