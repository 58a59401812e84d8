// No memory: what is not delivered is lost. For comparisons, and for what is sent whole.
// Law: nothing is owed.

#include "topreduce/catalog.h"
#include "topreduce/feedback/on_device.h"
#include "topreduce/feedback/walk.h"

namespace topreduce::feedback {
namespace {

class None final : public Feedback {
 public:
  std::span<const float> base() const override { return {}; }

  double commit(const Pending& pending, const exchange::Delivery& delivery, int ranks,
                float unit) override {
    if (pending.device() != nullptr) return commit_on_device(pending, delivery, ranks, unit);
    const auto divisor = static_cast<float>(ranks);
    return sum_over_blocks(pending, delivery, [&](const Block& block, Walk& walk) {
      double gone = 0;
      if (delivery.extent == exchange::Delivery::Extent::whole) {
        for (std::size_t i = 0; i < block.gradient.size(); ++i) {
          const double x = pending.scale() * block.gradient[i];
          gone += x * x;
          block.gradient[i] = delivery.dense_sum[block.start + i] / divisor * unit;
        }
        return gone;
      }
      const auto had = [&](std::size_t i) { return pending.scale() * block.gradient[i]; };
      walk.settled(block, had, [&](std::size_t i, float value) {
        const double x = had(i), left = x - value;
        gone += x * x - left * left;
      });
      std::ranges::fill(block.gradient, 0.0f);
      walk.sum(block,
               [&](std::size_t i, float value) { block.gradient[i] = value / divisor * unit; });
      return gone;
    });
  }

  bool move_to(Device*) override { return true; }

  void visit(StateVisitor&) override {}
};

}  // namespace

std::unique_ptr<Feedback> make_none(const Settings&, const Layout&) {
  return std::make_unique<None>();
}

}  // namespace topreduce::feedback
