// Error feedback: what was not settled is added to the next gradient.
// Law, on each rank: owed after = owed before + gradient - settled.
// Seide et al. 2014; Stich et al. 2018; Karimireddy et al. 2019 (arXiv 1901.09847).

#include <algorithm>
#include <utility>

#include "topreduce/catalog.h"
#include "topreduce/feedback/on_device.h"
#include "topreduce/feedback/walk.h"

namespace topreduce::feedback {
namespace {

class Residual final : public Feedback {
 public:
  explicit Residual(std::size_t entries) : entries_(entries), owed_(entries) {}

  std::span<const float> base() const override {
    return device_ == nullptr ? std::span<const float>(owed_) : std::span<const float>();
  }
  bool has_base() const override { return entries_ > 0; }
  bool takes_back() const override { return device_ == nullptr; }
  std::span<const float> owed() const override {
    fetch();
    return owed_;
  }

  double commit(const CompensatedGradient& compensated, const exchange::Result& result, int ranks,
                float unit) override {
    if (compensated.device() != nullptr) {
      commit_on_device(compensated, result, ranks, unit);
      return 0;  // the device is asked once for all
    }
    const auto divisor = static_cast<float>(ranks);
    return sum_over_blocks(compensated, result, [&](const Block& block, Walk& walk) {
      const std::span<float> owed(owed_.data() + block.offset, block.gradient.size());
      kernels::absorb(owed, block.gradient, compensated.scale());
      const double gone = take_off(owed, block, walk);
      walk.sum(block,
               [&](std::size_t i, float value) { block.gradient[i] = value / divisor * unit; });
      return gone;
    });
  }

  bool settles_early() const override { return device_ == nullptr; }
  std::uint32_t take_in(std::size_t offset, std::span<float> gradient,
                        float scale) noexcept override {
    return kernels::absorb_and_save({owed_.data() + offset, gradient.size()}, gradient, scale);
  }
  double settle(const CompensatedGradient& compensated, const exchange::Result& result) override {
    return sum_over_blocks(compensated, result, [&](const Block& block, Walk& walk) {
      if (!compensated.is_taken_in()) take_in(block.offset, block.gradient, compensated.scale());
      return take_off({owed_.data() + block.offset, block.gradient.size()}, block, walk);
    });
  }
  void unsettle(const Segment& segment) noexcept override {
    std::ranges::copy(segment.gradient,
                      owed_.begin() + static_cast<std::ptrdiff_t>(segment.offset));
    std::ranges::fill(segment.gradient, 0.0f);
  }

  bool move_to(Device* device) override {
    if (device == device_) return true;
    fetch();
    if (device != nullptr) device->write(owed_);
    Device* const left = std::exchange(device_, device);
    drop_copy();
    try {
      if (left != nullptr) left->write({});
    } catch (...) {  // it moved all the same; the device keeps memory that nobody looks at
    }
    return true;
  }

  void visit(StateVisitor& visitor) override {
    fetch();
    visitor.entries("owed", owed_);
    if (device_ != nullptr && visitor.purpose() == StateVisitor::Purpose::load) {
      device_->write(owed_);
    }
    drop_copy();
  }

 private:
  // What was settled; returns the energy that went with it.
  static double take_off(std::span<float> owed, const Block& block, Walk& walk) {
    double gone = 0;
    walk.settled(
        block, [&](std::size_t i) { return owed[i]; },
        [&](std::size_t i, float value) {
          const double x = owed[i];
          owed[i] -= value;
          gone += x * x - static_cast<double>(owed[i]) * owed[i];
        });
    return gone;
  }

  void fetch() const {
    if (device_ == nullptr) return;
    owed_.resize(entries_);
    device_->read(owed_);
  }
  void drop_copy() {
    if (device_ != nullptr) owed_ = Zeros<float>();
  }

  std::size_t entries_;
  mutable Zeros<float> owed_;  // a copy, while anyone looks, of what is on the device
  Device* device_ = nullptr;
};

}  // namespace

std::unique_ptr<Feedback> make_residual(const Settings&, const Layout& layout) {
  return std::make_unique<Residual>(layout.size());
}

}  // namespace topreduce::feedback
