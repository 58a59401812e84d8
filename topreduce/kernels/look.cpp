// Passes that look at base + scale * gradient and store none of it.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "topreduce/kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "topreduce/kernels/look.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace topreduce::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes, so that the hits of a group of four vectors fit in 64 bits.
using Floats = hn::CappedTag<float, 16>;
using Values = hn::Vec<Floats>;
using Passes = hn::Mask<Floats>;

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

HWY_INLINE std::uint64_t bits_of(Passes passes) {
  std::uint64_t bits = 0;
  hn::StoreMaskBits(Floats(), passes, reinterpret_cast<std::uint8_t*>(&bits));
  return bits;
}

// Squares add up in float within one block only: at most 128 per lane, which keeps the relative
// error below 1e-5. And a block is still in the first cache when its hits are read again.
constexpr std::size_t kBlock = 512;

// A float cannot hold the squares of very large or very small values.
HWY_INLINE bool trustworthy(float energy) {
  return energy > 0x1p-100f && energy <= std::numeric_limits<float>::max();
}

// Per block, one pass over all entries that only notes which groups have hits, then one over the
// hits. At 1 % a branch per group would be mispredicted so often that it costs a fifth of the pass.
template <class Source>
std::size_t collect(const Source& source, float threshold, Index first, Index* indices,
                    float* values, Summary& summary) {
  const Terms& terms = source.terms;
  const Floats d;
  const hn::RebindToSigned<Floats> bits;
  const std::size_t lanes = hn::Lanes(d);
  const std::size_t group = 4 * lanes;
  const std::size_t stride = std::max<std::size_t>(lanes, 8);  // bits between vectors in a mask
  const auto cut = hn::Set(d, threshold);
  std::uint64_t hits[kBlock / 4];
  std::size_t places[kBlock / 4];
  std::size_t count = 0;
  std::size_t i = 0;
  while (i + group <= terms.size()) {
    const std::size_t start = i;
    const std::size_t end = std::min(start + kBlock, terms.size());
    auto energies = hn::Zero(d);
    auto largest = hn::Zero(bits);
    std::size_t groups = 0;
    for (; i + group <= end; i += group) {
      const auto x0 = source.load(i);
      const auto x1 = source.load(i + lanes);
      const auto x2 = source.load(i + 2 * lanes);
      const auto x3 = source.load(i + 3 * lanes);
      const auto magnitude0 = hn::Abs(x0);
      const auto magnitude1 = hn::Abs(x1);
      const auto magnitude2 = hn::Abs(x2);
      const auto magnitude3 = hn::Abs(x3);
      hits[groups] = bits_of(hn::Ge(magnitude0, cut)) | bits_of(hn::Ge(magnitude1, cut)) << stride |
                     bits_of(hn::Ge(magnitude2, cut)) << (2 * stride) |
                     bits_of(hn::Ge(magnitude3, cut)) << (3 * stride);
      places[groups] = i;
      groups += hits[groups] != 0;
      const auto energy01 = hn::MulAdd(x1, x1, hn::Mul(x0, x0));
      const auto energy23 = hn::MulAdd(x3, x3, hn::Mul(x2, x2));
      energies = hn::Add(energies, hn::Add(energy01, energy23));
      const auto largest01 = hn::Max(hn::BitCast(bits, magnitude0), hn::BitCast(bits, magnitude1));
      const auto largest23 = hn::Max(hn::BitCast(bits, magnitude2), hn::BitCast(bits, magnitude3));
      largest = hn::Max(largest, hn::Max(largest01, largest23));
    }
    for (std::size_t g = 0; g < groups; ++g) {
      for (std::uint64_t rest = hits[g]; rest != 0; rest &= rest - 1) {
        const auto bit = static_cast<std::size_t>(std::countr_zero(rest));
        const std::size_t hit = places[g] + bit / stride * lanes + bit % stride;
        indices[count] = first + static_cast<Index>(hit);
        values[count] = terms[hit];
        ++count;
      }
    }
    const float energy = hn::GetLane(hn::SumOfLanes(d, energies));
    const auto block_largest =
        static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(bits, largest)));
    summary.largest_bits = std::max(summary.largest_bits, block_largest);
    if (trustworthy(energy)) {
      summary.energy += static_cast<double>(energy);
    } else if (block_largest != 0) {
      scalar::summarize(terms.part(start, i - start), summary);
    }
  }
  return count + scalar::collect_above(terms.part(i, terms.size() - i), threshold,
                                       first + static_cast<Index>(i), indices + count,
                                       values + count, summary);
}

std::size_t collect_above(const Terms& terms, float threshold, Index first, Index* indices,
                          float* values, Summary& summary) {
  return terms.base.empty()
             ? collect(Gradient{terms}, threshold, first, indices, values, summary)
             : collect(BaseAndGradient{terms}, threshold, first, indices, values, summary);
}

template <class Source>
std::size_t count(const Source& source, float threshold) {
  const Terms& terms = source.terms;
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  const auto cut = hn::Set(d, threshold);
  std::size_t above = 0;
  std::size_t i = 0;
  for (; i + lanes <= terms.size(); i += lanes) {
    above += hn::CountTrue(d, hn::Ge(hn::Abs(source.load(i)), cut));
  }
  return above + scalar::count_above(terms.part(i, terms.size() - i), threshold);
}

std::size_t count_above(const Terms& terms, float threshold) {
  return terms.base.empty() ? count(Gradient{terms}, threshold)
                            : count(BaseAndGradient{terms}, threshold);
}

}  // namespace HWY_NAMESPACE
}  // namespace topreduce::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace topreduce::kernels {

namespace scalar {

std::size_t collect_above(const Terms& terms, float threshold, Index first, Index* indices,
                          float* values, Summary& summary) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < terms.size(); ++i) {
    const float x = terms[i];
    if (std::abs(x) >= threshold) {
      indices[count] = first + static_cast<Index>(i);
      values[count] = x;
      ++count;
    }
  }
  scalar::summarize(terms, summary);
  return count;
}

std::size_t count_above(const Terms& terms, float threshold) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < terms.size(); ++i) count += std::abs(terms[i]) >= threshold;
  return count;
}

void summarize(const Terms& terms, Summary& summary) {
  for (std::size_t i = 0; i < terms.size(); ++i) {
    const float x = terms[i];
    summary.energy += static_cast<double>(x) * static_cast<double>(x);
    summary.largest_bits =
        std::max(summary.largest_bits, std::bit_cast<std::uint32_t>(std::abs(x)));
  }
}

}  // namespace scalar

HWY_EXPORT(collect_above);
HWY_EXPORT(count_above);

std::size_t collect_above(const Terms& terms, float threshold, Index first, Index* indices,
                          float* values, Summary& summary) {
  return HWY_DYNAMIC_DISPATCH(collect_above)(terms, threshold, first, indices, values, summary);
}

std::size_t count_above(const Terms& terms, float threshold) {
  return HWY_DYNAMIC_DISPATCH(count_above)(terms, threshold);
}

// Nothing reaches a threshold of NaN, so this collects nothing.
void summarize(const Terms& terms, Summary& summary) {
  collect_above(terms, std::numeric_limits<float>::quiet_NaN(), 0, nullptr, nullptr, summary);
}

}  // namespace topreduce::kernels
#endif  // HWY_ONCE
