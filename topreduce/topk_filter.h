#pragma once

#include <cmath>
#include <span>

#include "topreduce/kernels/kernels.h"

namespace topreduce {

/// Of some values the k strongest, ties to the earlier: asked one after the other in their order.
class TopkFilter {
 public:
  /// 1 <= k
  TopkFilter(std::span<const float> values, std::size_t k) : ties_(values.size()) {
    if (k >= values.size()) return;
    weakest_ = kernels::kth_magnitude(values, k);
    std::size_t stronger = 0;
    for (const float value : values) stronger += std::abs(value) > weakest_ ? 1 : 0;
    ties_ = k - stronger;
  }

  /// The magnitude of the k-th; 0 if there are no more than k.
  float weakest() const { return weakest_; }

  /// A NaN counts as a tie: k are kept, whatever they are.
  bool keeps(float value) {
    const float magnitude = std::abs(value);
    if (magnitude > weakest_) return true;
    if (magnitude < weakest_ || ties_ == 0) return false;
    --ties_;
    return true;
  }

 private:
  float weakest_ = 0;
  std::size_t ties_;  // still to be kept
};

}  // namespace topreduce
