// Passes that write: evaluate, absorb, add. Memory is the limit, so the loops are plain.
// Prefetching gained nothing; streaming stores for the zeros made absorb 1.5 times as slow.

#include <algorithm>
#include <bit>
#include <cmath>

#include "topreduce/kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "topreduce/kernels/store.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace topreduce::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void evaluate(const Terms& terms, std::span<float> out) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto scale = hn::Set(d, terms.scale);
  const float* gradient = terms.gradient.data();
  const float* base = terms.base.data();
  std::size_t i = 0;
  if (terms.base.empty()) {
    for (; i + lanes <= terms.size(); i += lanes) {
      hn::StoreU(hn::Mul(scale, hn::LoadU(d, gradient + i)), d, out.data() + i);
    }
  } else {
    for (; i + lanes <= terms.size(); i += lanes) {
      const auto scaled = hn::Mul(scale, hn::LoadU(d, gradient + i));
      hn::StoreU(hn::Add(hn::LoadU(d, base + i), scaled), d, out.data() + i);
    }
  }
  scalar::evaluate(terms.part(i, terms.size() - i), out.subspan(i));
}

void absorb(std::span<float> base, std::span<float> gradient, float scale) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto factor = hn::Set(d, scale);
  std::size_t i = 0;
  for (; i + lanes <= gradient.size(); i += lanes) {
    const auto scaled = hn::Mul(factor, hn::LoadU(d, gradient.data() + i));
    hn::StoreU(hn::Add(hn::LoadU(d, base.data() + i), scaled), d, base.data() + i);
    hn::StoreU(hn::Zero(d), d, gradient.data() + i);
  }
  scalar::absorb(base.subspan(i), gradient.subspan(i), scale);
}

std::uint32_t absorb_and_save(std::span<float> base, std::span<float> gradient, float scale) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> bits;
  const std::size_t lanes = hn::Lanes(d);
  const auto factor = hn::Set(d, scale);
  auto largest = hn::Zero(bits);
  std::size_t i = 0;
  for (; i + lanes <= gradient.size(); i += lanes) {
    const auto before = hn::LoadU(d, base.data() + i);
    const auto scaled = hn::Mul(factor, hn::LoadU(d, gradient.data() + i));
    hn::StoreU(hn::Add(before, scaled), d, base.data() + i);
    hn::StoreU(before, d, gradient.data() + i);
    largest = hn::Max(largest, hn::BitCast(bits, hn::Abs(scaled)));
  }
  const std::uint32_t rest = scalar::absorb_and_save(base.subspan(i), gradient.subspan(i), scale);
  return std::max(rest, static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(bits, largest))));
}

void add(std::span<float> sum, std::span<const float> part) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= sum.size(); i += lanes) {
    hn::StoreU(hn::Add(hn::LoadU(d, sum.data() + i), hn::LoadU(d, part.data() + i)), d,
               sum.data() + i);
  }
  scalar::add(sum.subspan(i), part.subspan(i));
}

}  // namespace HWY_NAMESPACE
}  // namespace topreduce::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace topreduce::kernels {

namespace scalar {

void evaluate(const Terms& terms, std::span<float> out) {
  for (std::size_t i = 0; i < terms.size(); ++i) out[i] = terms[i];
}

void absorb(std::span<float> base, std::span<float> gradient, float scale) {
  for (std::size_t i = 0; i < base.size(); ++i) {
    const float scaled = scale * gradient[i];
    base[i] += scaled;
  }
  std::ranges::fill(gradient, 0.0f);
}

std::uint32_t absorb_and_save(std::span<float> base, std::span<float> gradient, float scale) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < base.size(); ++i) {
    const float before = base[i], scaled = scale * gradient[i];
    base[i] = before + scaled;
    gradient[i] = before;
    largest = std::max(largest, std::bit_cast<std::uint32_t>(std::abs(scaled)));
  }
  return largest;
}

void add(std::span<float> sum, std::span<const float> part) {
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
}

}  // namespace scalar

HWY_EXPORT(evaluate);
HWY_EXPORT(absorb);
HWY_EXPORT(absorb_and_save);
HWY_EXPORT(add);

void evaluate(const Terms& terms, std::span<float> out) {
  HWY_DYNAMIC_DISPATCH(evaluate)(terms, out);
}

void absorb(std::span<float> base, std::span<float> gradient, float scale) {
  if (base.empty()) {
    std::ranges::fill(gradient, 0.0f);
  } else {
    HWY_DYNAMIC_DISPATCH(absorb)(base, gradient, scale);
  }
}

std::uint32_t absorb_and_save(std::span<float> base, std::span<float> gradient, float scale) {
  return HWY_DYNAMIC_DISPATCH(absorb_and_save)(base, gradient, scale);
}

void add(std::span<float> sum, std::span<const float> part) {
  HWY_DYNAMIC_DISPATCH(add)(sum, part);
}

}  // namespace topreduce::kernels
#endif  // HWY_ONCE
