// The k-th largest magnitude, by histograms over an ever narrower range of magnitude bits.
//
// The first range runs from the smallest to the largest magnitude, so candidates that lie close
// together still spread over all bins. Each round keeps the bin that holds the answer: at most
// three rounds, and after the first almost all values are skipped by vector.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "topreduce/kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "topreduce/kernels/kth_magnitude.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace topreduce::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int kBinBits = 11;
using Bins = std::array<std::uint32_t, 1u << kBinBits>;

struct Range {
  std::uint32_t low = 0;
  std::uint32_t width = 0;  // the highest is low + width
};

HWY_INLINE std::uint32_t magnitude_bits(float x) {
  return std::bit_cast<std::uint32_t>(std::abs(x));
}

HWY_INLINE hn::Vec<hn::ScalableTag<std::uint32_t>> load_magnitude_bits(const float* values) {
  const hn::ScalableTag<float> d;
  return hn::BitCast(hn::RebindToUnsigned<decltype(d)>(), hn::Abs(hn::LoadU(d, values)));
}

Range range_of(std::span<const float> values) {
  const hn::ScalableTag<std::uint32_t> d;
  const std::size_t lanes = hn::Lanes(d);
  auto lows = hn::Set(d, magnitude_bits(values[0]));
  auto highs = lows;
  std::size_t i = 0;
  for (; i + lanes <= values.size(); i += lanes) {
    const auto magnitudes = load_magnitude_bits(values.data() + i);
    lows = hn::Min(lows, magnitudes);
    highs = hn::Max(highs, magnitudes);
  }
  std::uint32_t low = hn::GetLane(hn::MinOfLanes(d, lows));
  std::uint32_t high = hn::GetLane(hn::MaxOfLanes(d, highs));
  for (; i < values.size(); ++i) {
    low = std::min(low, magnitude_bits(values[i]));
    high = std::max(high, magnitude_bits(values[i]));
  }
  return {low, high - low};
}

// Counts the values within `range`, one bin for every 2^shift magnitudes.
void fill_bins(std::span<const float> values, Range range, int shift, Bins& bins) {
  const hn::ScalableTag<std::uint32_t> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto low = hn::Set(d, range.low);
  const auto width = hn::Set(d, range.width);
  const auto count = [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint32_t above = magnitude_bits(values[i]) - range.low;
      if (above <= range.width) ++bins[above >> shift];
    }
  };
  std::size_t i = 0;
  for (; i + 2 * lanes <= values.size(); i += 2 * lanes) {
    // What lies below the range wraps around and becomes huge.
    const auto above0 = hn::Sub(load_magnitude_bits(values.data() + i), low);
    const auto above1 = hn::Sub(load_magnitude_bits(values.data() + i + lanes), low);
    if (hn::AllTrue(d, hn::Gt(hn::Min(above0, above1), width))) continue;
    count(i, i + 2 * lanes);
  }
  count(i, values.size());
}

float kth_magnitude(std::span<const float> values, std::size_t k) {
  Range range = range_of(values);
  while (range.width != 0) {
    const int shift = std::max(0, static_cast<int>(std::bit_width(range.width)) - kBinBits);
    Bins bins{};
    fill_bins(values, range, shift, bins);
    std::uint32_t bin = range.width >> shift;
    for (; k > bins[bin]; --bin) k -= bins[bin];
    range = {range.low + (bin << shift), (1u << shift) - 1};
  }
  return std::bit_cast<float>(range.low);
}

}  // namespace HWY_NAMESPACE
}  // namespace topreduce::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace topreduce::kernels {

// The largest threshold that k values reach, found bit by bit.
float scalar::kth_magnitude(std::span<const float> values, std::size_t k) {
  std::uint32_t kth = 0;
  for (std::uint32_t bit = 1u << 30; bit != 0; bit >>= 1) {
    const auto reaches = [&](float x) {
      return std::bit_cast<std::uint32_t>(std::abs(x)) >= (kth | bit);
    };
    if (static_cast<std::size_t>(std::ranges::count_if(values, reaches)) >= k) kth |= bit;
  }
  return std::bit_cast<float>(kth);
}

HWY_EXPORT(kth_magnitude);

float kth_magnitude(std::span<const float> values, std::size_t k) {
  return HWY_DYNAMIC_DISPATCH(kth_magnitude)(values, k);
}

}  // namespace topreduce::kernels
#endif  // HWY_ONCE
