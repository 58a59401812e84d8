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

  double commit(const CompensatedGradient& compensated, const exchange::Result& result, int ranks,
                float unit) override {
    if (compensated.device() != nullptr) {
      commit_on_device(compensated, result, ranks, unit);
      return 0;  // the device is asked once for all
    }
    const auto divisor = static_cast<float>(ranks);
    return sum_over_blocks(compensated, result, [&](const Block& block, Walk& walk) {
      double gone = 0;
      if (result.extent == exchange::Result::Extent::whole) {
        for (std::size_t i = 0; i < block.gradient.size(); ++i) {
          const double x = compensated.scale() * block.gradient[i];
          gone += x * x;
          block.gradient[i] = result.dense_sum[block.start + i] / divisor * unit;
        }
        return gone;
      }
      const auto had = [&](std::size_t i) { return compensated.scale() * block.gradient[i]; };
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
