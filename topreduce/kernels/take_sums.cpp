// Takes the sums of sparse vectors out of the block in which they were added up.

#include <algorithm>
#include <bit>

#include "topreduce/kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "topreduce/kernels/take_sums.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace topreduce::kernels {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR
using scalar::take_sums;
#else
namespace hn = hwy::HWY_NAMESPACE;

// 64 flags as bits, which are cleared.
HWY_INLINE std::uint64_t take_flags(std::uint8_t* flags) {
  const hn::CappedTag<std::uint8_t, 64> d;
  const std::size_t lanes = hn::Lanes(d);
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < 64; i += lanes) {
    std::uint64_t some = 0;
    hn::StoreMaskBits(d, hn::Ne(hn::LoadU(d, flags + i), hn::Zero(d)),
                      reinterpret_cast<std::uint8_t*>(&some));
    hn::StoreU(hn::Zero(d), d, flags + i);
    bits |= some << i;
  }
  return bits;
}

constexpr std::size_t kWords = 64;  // looked at before any is written out
// From so many ones a word on vectors are faster.
constexpr std::size_t kMany = HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86 ? 6 : 16;
constexpr std::uint64_t kTop = std::uint64_t{1} << 63;  // a word without ones would need a branch

// The places of a word's ones, four at a time, whether there are as many or not: a wrong guess
// would cost more than three places. Returns their end.
HWY_INLINE Index* put_places(std::uint64_t bits, Index place, Index* out) {
  Index* const end = out + std::popcount(bits);
  do {
    for (std::size_t k = 0; k < 4; ++k) {
      out[k] = place + static_cast<Index>(std::countr_zero(bits | kTop));
      bits &= bits - 1;
    }
    out += 4;
  } while (bits != 0);
  return end;
}

// All places of a word, vector by vector; returns how many had a one.
HWY_INLINE std::size_t take_word(std::uint64_t bits, Index place, float* sums, Index* indices,
                                 float* values) {
  std::size_t count = 0;
  const hn::CappedTag<float, 16> d;
  const hn::RebindToUnsigned<decltype(d)> places;
  alignas(64) static constexpr Index kLanes[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                   8, 9, 10, 11, 12, 13, 14, 15};
  const auto numbers = hn::Load(places, kLanes);
  const std::size_t lanes = hn::Lanes(d);
  for (std::size_t i = 0; i < 64; i += lanes) {
    const std::uint64_t some = bits >> i & ((std::uint64_t{1} << lanes) - 1);
    const auto mask = hn::LoadMaskBits(d, reinterpret_cast<const std::uint8_t*>(&some));
    const auto all = hn::Add(numbers, hn::Set(places, place + static_cast<Index>(i)));
    hn::StoreU(hn::Compress(all, hn::RebindMask(places, mask)), places, indices + count);
    hn::StoreU(hn::Compress(hn::LoadU(d, sums + i), mask), d, values + count);
    hn::StoreU(hn::Set(d, kNothing), d, sums + i);
    count += static_cast<std::size_t>(std::popcount(some));
  }
  return count;
}

// One pass that only notes which words have flags, then one over those: for few ones a word, their
// places and then their sums; for many, both with vectors.
std::size_t take_sums(std::span<std::uint8_t> flags, float* sums, Index first, Index* indices,
                      float* values) {
  std::uint64_t words[kWords];
  Index places[kWords];
  std::size_t found = 0, i = 0;
  while (i + 64 <= flags.size()) {
    const std::size_t end = std::min(i + 64 * kWords, flags.size() / 64 * 64);
    std::size_t count = 0, ones = 0;
    for (; i < end; i += 64) {
      words[count] = take_flags(flags.data() + i);
      places[count] = static_cast<Index>(i);
      ones += static_cast<std::size_t>(std::popcount(words[count]));
      count += words[count] != 0;
    }
    if (ones >= kMany * count) {
      for (std::size_t w = 0; w < count; ++w) {
        found += take_word(words[w], first + places[w], sums + places[w], indices + found,
                           values + found);
      }
      continue;
    }
    Index* out = indices + found;
    for (std::size_t w = 0; w < count; ++w) out = put_places(words[w], first + places[w], out);
    for (const std::size_t last = found + ones; found < last; ++found) {
      const std::size_t at = indices[found] - first;
      values[found] = sums[at];
      sums[at] = kNothing;
    }
  }
  return found + scalar::take_sums(flags.subspan(i), sums + i, first + static_cast<Index>(i),
                                   indices + found, values + found);
}

#endif
}  // namespace HWY_NAMESPACE
}  // namespace topreduce::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace topreduce::kernels {

namespace scalar {

std::size_t take_sums(std::span<std::uint8_t> flags, float* sums, Index first, Index* indices,
                      float* values) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    if (flags[i] == 0) continue;
    indices[count] = first + static_cast<Index>(i);
    values[count] = sums[i];
    flags[i] = 0;
    sums[i] = kNothing;
    ++count;
  }
  return count;
}

}  // namespace scalar

HWY_EXPORT(take_sums);

std::size_t take_sums(std::span<std::uint8_t> flags, float* sums, Index first, Index* indices,
                      float* values) {
  return HWY_DYNAMIC_DISPATCH(take_sums)(flags, sums, first, indices, values);
}

}  // namespace topreduce::kernels
#endif  // HWY_ONCE
