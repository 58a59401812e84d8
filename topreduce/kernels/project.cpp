// Rows times a few directions. A row is short and stays in the first cache, so four directions at a
// time hide the latency of the sums; fewer cost as much as four.

#include <algorithm>

#include "topreduce/kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "topreduce/kernels/project.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#ifndef TOPREDUCE_KERNELS_PROJECT_ONCE
#define TOPREDUCE_KERNELS_PROJECT_ONCE
namespace topreduce::kernels {
constexpr std::size_t kPartialSums = 16;
inline float add_up(float (&partial)[kPartialSums]) {
  for (std::size_t half = kPartialSums / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) partial[i] += partial[i + half];
  }
  return partial[0];
}
}  // namespace topreduce::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace topreduce::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::CappedTag<float, kPartialSums>;
using Values = hn::Vec<Floats>;

struct Gradient {
  HWY_INLINE Values load(std::size_t i) const {
    const Floats d;
    return hn::Mul(hn::Set(d, terms.scale), hn::LoadU(d, terms.gradient.data() + i));
  }
  const Terms& terms;
};

struct BaseAndGradient {
  HWY_INLINE Values load(std::size_t i) const {
    return hn::Add(hn::LoadU(Floats(), terms.base.data() + i), Gradient{terms}.load(i));
  }
  const Terms& terms;
};

template <class Source>
void project_on(const Source& source, const float* directions, std::size_t stride,
                std::span<float> out) {
  const Terms& terms = source.terms;
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  const std::size_t whole = terms.size() / kPartialSums * kPartialSums;
  for (std::size_t j = 0; j < out.size(); j += 4) {
    const float* direction[4];
    for (std::size_t c = 0; c < 4; ++c) {
      direction[c] = directions + std::min(j + c, out.size() - 1) * stride;
    }
    float partial[4][kPartialSums];
    for (std::size_t lane = 0; lane < kPartialSums; lane += lanes) {
      auto sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
      for (std::size_t i = lane; i < whole; i += kPartialSums) {
        const auto x = source.load(i);
        sum0 = hn::Add(sum0, hn::Mul(x, hn::LoadU(d, direction[0] + i)));
        sum1 = hn::Add(sum1, hn::Mul(x, hn::LoadU(d, direction[1] + i)));
        sum2 = hn::Add(sum2, hn::Mul(x, hn::LoadU(d, direction[2] + i)));
        sum3 = hn::Add(sum3, hn::Mul(x, hn::LoadU(d, direction[3] + i)));
      }
      hn::StoreU(sum0, d, partial[0] + lane);
      hn::StoreU(sum1, d, partial[1] + lane);
      hn::StoreU(sum2, d, partial[2] + lane);
      hn::StoreU(sum3, d, partial[3] + lane);
    }
    for (std::size_t c = 0; c < std::min<std::size_t>(4, out.size() - j); ++c) {
      for (std::size_t i = whole; i < terms.size(); ++i) {
        const float product = terms[i] * direction[c][i];
        partial[c][i - whole] += product;
      }
      out[j + c] = add_up(partial[c]);
    }
  }
}

void project(const Terms& terms, const float* directions, std::size_t stride,
             std::span<float> out) {
  terms.base.empty() ? project_on(Gradient{terms}, directions, stride, out)
                     : project_on(BaseAndGradient{terms}, directions, stride, out);
}

}  // namespace HWY_NAMESPACE
}  // namespace topreduce::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace topreduce::kernels {

namespace scalar {

void project(const Terms& terms, const float* directions, std::size_t stride,
             std::span<float> out) {
  for (std::size_t j = 0; j < out.size(); ++j) {
    float partial[kPartialSums] = {};
    for (std::size_t i = 0; i < terms.size(); ++i) {
      const float product = terms[i] * directions[j * stride + i];
      partial[i % kPartialSums] += product;
    }
    out[j] = add_up(partial);
  }
}

}  // namespace scalar

HWY_EXPORT(project);

void project(const Terms& terms, const float* directions, std::size_t stride,
             std::span<float> out) {
  HWY_DYNAMIC_DISPATCH(project)(terms, directions, stride, out);
}

}  // namespace topreduce::kernels
#endif  // HWY_ONCE
