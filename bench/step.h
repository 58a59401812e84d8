#pragma once

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "topreduce/catalog.h"

// The passes of a step as users run it, over 26 M entries in 26 parameters.

namespace topreduce::bench {

inline constexpr std::size_t kEntries = 26'000'000;
inline constexpr std::size_t kParameters = 26;
inline constexpr int kGradients = 3;  // taken in turn, so that no two steps look alike
inline constexpr std::size_t kRanks = 4;

class Step {
 public:
  Step() : layout_(make_layout()) {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    std::vector<float> pool(1 << 20);
    for (float& value : pool) value = normal(rng) * std::exp(0.7f * normal(rng));
    const auto fill = [&](std::vector<float>& gradient) {
      gradient.resize(kEntries);
      for (float& value : gradient) value = pool[rng() % pool.size()];
    };
    for (auto& gradient : gradients_) fill(gradient);
    fill(spare_);
    for (std::size_t p = 0; p < kParameters; ++p) {
      segments_.push_back({.parameter = p,
                           .start = static_cast<Index>(layout_[p].offset),
                           .offset = layout_[p].offset,
                           .count = layout_[p].size});
    }
    // One residual is looked at and holds a gradient's worth; the other one takes the commits.
    looked_at_ = make_residual();
    written_ = make_residual();
    use(spare_);
    looked_at_->commit({segments_, looked_at_->base(), 1}, {}, kRanks, 1);
  }

  template <class Entry>
  static Settings settings(const Entry& entry) {
    return {entry.name, entry.settings, {}};
  }

  std::unique_ptr<select::Selector> make(const char* name) const {
    return find_select(name).make(settings(find_select(name)), layout_);
  }

  void choose(select::Selector& selector, double density) {
    use(gradients_[++turn_ % kGradients]);
    selector.begin({turn_, 0, static_cast<std::size_t>(density * kEntries), kEntries});
    kernels::Summary summary;
    double looked = 0;
    selector.choose({segments_, looked_at_->base(), 1, {}, *threads_}, selected_, summary, looked);
    benchmark::DoNotOptimize(summary);
    selector.commit();
  }

  // What `kRanks` ranks deliver that chose `density` each, without overlap.
  static exchange::Result result(double density) {
    const auto stride = static_cast<std::size_t>(1 / density);
    exchange::Result result;
    for (std::size_t i = 0; i < kEntries; i += stride / kRanks) {
      result.sum.push_back(static_cast<Index>(i), 1);
      if (i % stride == 0) result.settled.push_back(static_cast<Index>(i), 1);
    }
    return result;
  }

  void commit(const exchange::Result& result) {
    use(spare_);
    benchmark::DoNotOptimize(
        written_->commit({segments_, written_->base(), 1, {}, *threads_}, result, kRanks, 1));
  }

  void add() { kernels::add(sum_, gradients_[0]); }

  /// From here on the passes run on these.
  void use(Threads& threads) { threads_ = &threads; }

 private:
  static Layout make_layout() {
    std::vector<Parameter> parameters;
    for (std::size_t p = 0; p < kParameters; ++p) {
      parameters.push_back({std::to_string(p), {kEntries / kParameters}});
    }
    return Layout(std::move(parameters));
  }
  std::unique_ptr<feedback::Feedback> make_residual() const {
    return find_feedback("residual").make(settings(find_feedback("residual")), layout_);
  }
  void use(std::vector<float>& gradient) {
    for (Segment& segment : segments_) {
      segment.gradient = std::span(gradient).subspan(segment.offset, kEntries / kParameters);
    }
  }

  Threads* threads_ = &Threads::none();
  Layout layout_;
  std::vector<float> gradients_[kGradients];
  std::vector<float> spare_;
  std::vector<float> sum_ = std::vector<float>(kEntries);
  std::vector<Segment> segments_;
  std::unique_ptr<feedback::Feedback> looked_at_, written_;
  SparseVector selected_;
  std::uint64_t turn_ = 0;
};

}  // namespace topreduce::bench
