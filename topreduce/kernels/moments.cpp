// Sums over a vector in double. A float squared is exact in double, so only additions round; their
// order is fixed, so every target and every machine gets the same bits.

#include <algorithm>
#include <cmath>

#include "topreduce/kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "topreduce/kernels/moments.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#ifndef TOPREDUCE_KERNELS_MOMENTS_ONCE
#define TOPREDUCE_KERNELS_MOMENTS_ONCE
namespace topreduce::kernels {

/// Sixteen partial sums of each kind; entry i belongs to the (i modulo 16)-th.
struct PartialMoments {
  static constexpr std::size_t kCount = 16;
  double sum[kCount] = {}, magnitudes[kCount] = {}, squares[kCount] = {};

  void add(std::size_t i, float value) {
    const double x = value, square = x * x;
    sum[i % kCount] += x;
    magnitudes[i % kCount] += std::abs(x);
    squares[i % kCount] += square;
  }
  Moments total() {
    for (std::size_t half = kCount / 2; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) {
        sum[i] += sum[i + half];
        magnitudes[i] += magnitudes[i + half];
        squares[i] += squares[i + half];
      }
    }
    return {sum[0], magnitudes[0], squares[0]};
  }
};

}  // namespace topreduce::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace topreduce::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr std::size_t kBlock = 1 << 11;  // read once per group of lanes, so it must stay in cache

Moments moments(const Terms& terms) {
  const hn::CappedTag<double, PartialMoments::kCount> d;
  const hn::Rebind<float, decltype(d)> floats;
  const std::size_t lanes = hn::Lanes(d);
  const auto scale = hn::Set(floats, terms.scale);
  const float* base = terms.base.empty() ? nullptr : terms.base.data();
  const std::size_t whole = terms.size() / PartialMoments::kCount * PartialMoments::kCount;
  PartialMoments partial;
  for (std::size_t start = 0; start < whole; start += kBlock) {
    const std::size_t end = std::min(start + kBlock, whole);
    for (std::size_t lane = 0; lane < PartialMoments::kCount; lane += lanes) {
      auto sum = hn::LoadU(d, partial.sum + lane);
      auto magnitudes = hn::LoadU(d, partial.magnitudes + lane);
      auto squares = hn::LoadU(d, partial.squares + lane);
      for (std::size_t i = start + lane; i < end; i += PartialMoments::kCount) {
        auto value = hn::Mul(scale, hn::LoadU(floats, terms.gradient.data() + i));
        if (base != nullptr) value = hn::Add(hn::LoadU(floats, base + i), value);
        const auto x = hn::PromoteTo(d, value);
        sum = hn::Add(sum, x);
        magnitudes = hn::Add(magnitudes, hn::Abs(x));
        squares = hn::Add(squares, hn::Mul(x, x));
      }
      hn::StoreU(sum, d, partial.sum + lane);
      hn::StoreU(magnitudes, d, partial.magnitudes + lane);
      hn::StoreU(squares, d, partial.squares + lane);
    }
  }
  for (std::size_t i = whole; i < terms.size(); ++i) partial.add(i, terms[i]);
  return partial.total();
}

}  // namespace HWY_NAMESPACE
}  // namespace topreduce::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace topreduce::kernels {

Moments scalar::moments(const Terms& terms) {
  PartialMoments partial;
  for (std::size_t i = 0; i < terms.size(); ++i) partial.add(i, terms[i]);
  return partial.total();
}

HWY_EXPORT(moments);

Moments moments(const Terms& terms) {
  return HWY_DYNAMIC_DISPATCH(moments)(terms);
}

}  // namespace topreduce::kernels
#endif  // HWY_ONCE
