#include "topreduce/feedback/feedback.h"

#include <algorithm>
#include <cmath>

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

}  // namespace topreduce::feedback
