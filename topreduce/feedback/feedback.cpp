#include "topreduce/feedback/feedback.h"

#include <algorithm>
#include <cmath>

#include "topreduce/feedback/walk.h"

namespace topreduce::feedback {

float Feedback::largest_mean(const CompensatedGradient& compensated, const Segment& segment,
                             const exchange::Result& result, int ranks, float unit) const {
  const bool whole = result.extent == exchange::Result::Extent::whole;
  // A step that starts an estimate anew adds to nothing.
  const HeldMean held = compensated.plain() ? HeldMean() : held_mean();
  const auto& [places, values] = result.sum;
  const auto from = std::ranges::lower_bound(places, segment.start);
  auto next = static_cast<std::size_t>(from - places.begin());
  float largest = 0;
  for (std::size_t i = 0; i < segment.size(); ++i) {
    const std::size_t place = segment.start + i;
    float mean = held.values.empty() ? 0 : held.sign * held.values[segment.offset + i];
    if (whole) {
      mean += result.dense_sum[place] / static_cast<float>(ranks);
    } else if (next < places.size() && places[next] == place) {
      mean += values[next++] / static_cast<float>(ranks);
    }
    largest = std::max(largest, std::abs(mean * unit));
  }
  return largest;
}

void Feedback::hand_out(const CompensatedGradient& compensated, const exchange::Result& result,
                        int ranks, float unit) {
  const auto divisor = static_cast<float>(ranks);
  sum_over_blocks(compensated, result, [&](const Block& block, Walk& walk) {
    if (block.mean.data() == block.gradient.data()) std::ranges::fill(block.mean, 0.0f);
    walk.sum(block, [&](std::size_t i, float value) { block.mean[i] = value / divisor * unit; });
    return 0.0;
  });
}

}  // namespace topreduce::feedback
