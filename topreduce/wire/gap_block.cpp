#include "topreduce/wire/gap_block.h"

#include <array>
#include <bit>

#include "topreduce/wire/little_endian.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "topreduce/wire/gap_block.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace topreduce::wire {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR
using scalar::best_parameter;
using scalar::find_ones;
using scalar::join_gaps;
using scalar::pack_lows;
#else
namespace hn = hwy::HWY_NAMESPACE;

// Words of a row: eight strings, in one vector or in two.
#if HWY_TARGET <= HWY_AVX2 && HWY_ARCH_X86
using Words = hn::FixedTag<std::uint32_t, 8>;
#else
using Words = hn::FixedTag<std::uint32_t, 4>;
#endif
using Word = hn::Vec<Words>;
using Octets = hn::Repartition<std::uint8_t, Words>;
constexpr std::size_t kStrings = 8;
constexpr std::size_t kLanes = hn::MaxLanes(Words());
constexpr std::size_t kRows = kBlockGaps / kStrings;

HWY_INLINE Word load_words(const std::byte* in) {
  return hn::BitCast(Words(), hn::LoadU(Octets(), reinterpret_cast<const std::uint8_t*>(in)));
}
HWY_INLINE void store_words(Word words, std::byte* out) {
  hn::StoreU(hn::BitCast(Octets(), words), Octets(), reinterpret_cast<std::uint8_t*>(out));
}

unsigned best_parameter(const Index* gaps, unsigned guess) {
  const Words d;
  const auto shift = static_cast<int>(guess);
  Word sum0 = hn::Zero(d), sum1 = hn::Zero(d), sum2 = hn::Zero(d);
  for (std::size_t i = 0; i < kBlockGaps; i += kLanes) {
    const Word quotient = hn::ShiftRightSame(hn::LoadU(d, gaps + i), shift);
    sum0 = hn::Add(sum0, quotient);
    sum1 = hn::Add(sum1, hn::ShiftRight<1>(quotient));
    sum2 = hn::Add(sum2, hn::ShiftRight<2>(quotient));
  }
  // Gaps of one message add up to less than 2^32, so no sum of theirs is larger.
  const std::uint64_t bits0 = hn::GetLane(hn::SumOfLanes(d, sum0));
  const std::uint64_t bits1 = hn::GetLane(hn::SumOfLanes(d, sum1)) + kBlockGaps;
  const std::uint64_t bits2 = hn::GetLane(hn::SumOfLanes(d, sum2)) + 2 * kBlockGaps;
  if (bits0 <= bits1 && bits0 <= bits2) return guess;
  return bits1 <= bits2 ? guess + 1 : guess + 2;
}

void pack_lows(const Index* gaps, unsigned parameter, std::byte* out) {
  const Words d;
  if (parameter == 0) return;
  const Word mask = hn::Set(d, (std::uint32_t{1} << parameter) - 1);
  for (std::size_t half = 0; half < kStrings; half += kLanes) {
    std::byte* words = out + 4 * half;
    Word pending = hn::Zero(d);
    unsigned filled = 0;
    for (std::size_t row = 0; row < kRows; ++row) {
      const Word low = hn::And(hn::LoadU(d, gaps + row * kStrings + half), mask);
      pending = hn::Or(pending, hn::ShiftLeftSame(low, static_cast<int>(filled)));
      filled += parameter;
      if (filled < 32) continue;
      store_words(pending, words);
      words += 4 * kStrings;
      filled -= 32;
      pending = hn::ShiftRightSame(low, static_cast<int>(parameter - filled));
    }
  }
}

// The vector at bit `at` of all strings.
HWY_INLINE Word unpack(const std::byte* words, std::size_t at, unsigned parameter, Word mask) {
  const std::size_t offset = at % 32;
  const std::byte* word = words + at / 32 * 4 * kStrings;
  Word low = hn::ShiftRightSame(load_words(word), static_cast<int>(offset));
  if (offset + parameter > 32) {
    const Word next = load_words(word + 4 * kStrings);
    low = hn::Or(low, hn::ShiftLeftSame(next, static_cast<int>(32 - offset)));
  }
  return hn::And(low, mask);
}

// Each lane plus all before it.
HWY_INLINE Word prefix_sums(Word x) {
  const Words d;
  x = hn::Add(x, hn::ShiftLeftLanes<1>(d, x));
  x = hn::Add(x, hn::ShiftLeftLanes<2>(d, x));
#if HWY_TARGET <= HWY_AVX2 && HWY_ARCH_X86
  const Word lower = hn::ConcatLowerLower(d, x, hn::Zero(d));
  x = hn::Add(x, hn::Broadcast<3>(lower));
#endif
  return x;
}

HWY_INLINE Word last_lane(Word x) {
#if HWY_TARGET <= HWY_AVX2 && HWY_ARCH_X86
  return hn::TableLookupLanes(
      x, hn::SetTableIndices(Words(), std::array<std::int32_t, 8>{7, 7, 7, 7, 7, 7, 7, 7}.data()));
#else
  return hn::Broadcast<3>(x);
#endif
}

std::uint32_t join_gaps(const std::uint32_t* ones, const std::byte* lows, unsigned parameter,
                        Index first, Index* indices) {
  const Words d;
  const Word mask = hn::Set(d, (std::uint32_t{1} << parameter) - 1);
  const auto shift = static_cast<int>(parameter);
  const Word start = hn::Set(d, first);
  Word numbers = hn::Iota(d, 0);
  Word before = hn::Zero(d);  // low parts of all rows so far
  for (std::size_t row = 0; row < kRows; ++row) {
    for (std::size_t half = 0; half < kStrings; half += kLanes) {
      if (parameter > 0) {
        const Word sums = prefix_sums(unpack(lows + 4 * half, row * parameter, parameter, mask));
        const Word quotients = hn::Sub(hn::LoadU(d, ones + row * kStrings + half), numbers);
        const Word above = hn::Add(hn::ShiftLeftSame(quotients, shift), hn::Add(numbers, start));
        hn::StoreU(hn::Add(above, hn::Add(sums, before)), d, indices + row * kStrings + half);
        before = hn::Add(before, last_lane(sums));
      } else {
        hn::StoreU(hn::Add(hn::LoadU(d, ones + row * kStrings + half), start), d,
                   indices + row * kStrings + half);
      }
      numbers = hn::Add(numbers, hn::Set(d, static_cast<std::uint32_t>(kLanes)));
    }
  }
  return hn::GetLane(before);
}

constexpr std::uint64_t kTop = std::uint64_t{1} << 63;  // a word without ones would need a branch

// Eight ones at a time, whether there are as many or not: a word's number of ones is anyone's
// guess.
std::uint64_t find_ones(std::span<const std::byte> bytes, std::uint64_t start, std::size_t count,
                        std::uint32_t* places) {
  std::size_t at = static_cast<std::size_t>(start / 8), found = 0;
  std::uint64_t used = ~std::uint64_t{0} << start % 8;
  auto place = static_cast<std::uint32_t>(0 - start % 8);
  for (;; at += 8, place += 64, used = ~std::uint64_t{0}) {
    std::uint64_t rest = load_up_to(bytes, at) & used;
    std::uint32_t* out = places + found;
    found += static_cast<std::size_t>(std::popcount(rest));
    for (; rest != 0; out += 8) {
      for (std::size_t i = 0; i < 8; ++i) {
        out[i] = place + static_cast<std::uint32_t>(std::countr_zero(rest | kTop));
        rest &= rest - 1;
      }
    }
    if (found >= count) return 8 * std::uint64_t{at} + (places[count - 1] - place) + 1;
    if (at + 8 >= bytes.size()) return kNoOnes;
  }
}

#endif
}  // namespace HWY_NAMESPACE
}  // namespace topreduce::wire
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace topreduce::wire {

namespace scalar {

unsigned best_parameter(const Index* gaps, unsigned guess) {
  unsigned best = guess;
  std::uint64_t least = ~std::uint64_t{0};
  for (unsigned parameter = guess; parameter < guess + 3; ++parameter) {
    std::uint64_t bits = kBlockGaps * parameter;
    for (std::size_t j = 0; j < kBlockGaps; ++j) bits += gaps[j] >> parameter;
    if (bits < least) {
      least = bits;
      best = parameter;
    }
  }
  return best;
}

void pack_lows(const Index* gaps, unsigned parameter, std::byte* out) {
  for (std::size_t string = 0; string < 8; ++string) {
    std::uint64_t pending = 0;
    unsigned filled = 0;
    std::size_t word = string;
    for (std::size_t j = string; j < kBlockGaps; j += 8) {
      pending |= std::uint64_t{gaps[j] & ((std::uint32_t{1} << parameter) - 1)} << filled;
      filled += parameter;
      if (filled < 32) continue;
      store(out + 4 * word, static_cast<std::uint32_t>(pending));
      word += 8;
      pending >>= 32;
      filled -= 32;
    }
  }
}

std::uint64_t find_ones(std::span<const std::byte> bytes, std::uint64_t start, std::size_t count,
                        std::uint32_t* places) {
  std::size_t found = 0;
  for (std::uint64_t bit = start; bit < 8 * bytes.size(); ++bit) {
    if ((static_cast<unsigned>(bytes[bit / 8]) >> bit % 8 & 1) == 0) continue;
    places[found++] = static_cast<std::uint32_t>(bit - start);
    if (found == count) return bit + 1;
  }
  return kNoOnes;
}

std::uint32_t join_gaps(const std::uint32_t* ones, const std::byte* lows, unsigned parameter,
                        Index first, Index* indices) {
  std::uint32_t sum = 0;
  for (std::uint32_t j = 0; j < kBlockGaps; ++j) {
    std::uint32_t low = 0;
    for (unsigned bit = 0; bit < parameter; ++bit) {
      const std::size_t at = j / 8 * parameter + bit;  // in string j % 8
      const auto word = load<std::uint32_t>(lows + 4 * (at / 32 * 8 + j % 8));
      low |= (word >> at % 32 & 1) << bit;
    }
    sum += low;
    indices[j] = first + j + sum + ((ones[j] - j) << parameter);
  }
  return sum;
}

}  // namespace scalar

HWY_EXPORT(best_parameter);
HWY_EXPORT(pack_lows);
HWY_EXPORT(find_ones);
HWY_EXPORT(join_gaps);

unsigned best_parameter(const Index* gaps, unsigned guess) {
  return HWY_DYNAMIC_DISPATCH(best_parameter)(gaps, guess);
}

void pack_lows(const Index* gaps, unsigned parameter, std::byte* out) {
  if constexpr (kLittleEndian) return HWY_DYNAMIC_DISPATCH(pack_lows)(gaps, parameter, out);
  scalar::pack_lows(gaps, parameter, out);
}

std::uint64_t find_ones(std::span<const std::byte> bytes, std::uint64_t start, std::size_t count,
                        std::uint32_t* places) {
  return HWY_DYNAMIC_DISPATCH(find_ones)(bytes, start, count, places);
}

std::uint32_t join_gaps(const std::uint32_t* ones, const std::byte* lows, unsigned parameter,
                        Index first, Index* indices) {
  if constexpr (kLittleEndian) {
    return HWY_DYNAMIC_DISPATCH(join_gaps)(ones, lows, parameter, first, indices);
  }
  return scalar::join_gaps(ones, lows, parameter, first, indices);
}

}  // namespace topreduce::wire
#endif  // HWY_ONCE
