#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "topreduce/wire/little_endian.h"

// A kind of floats rounds a float to one that it can express, narrows that to its code, and widens
// the code again. Nothing jumps, so that loops over them become vector code.

namespace topreduce::wire::formats {

inline constexpr std::uint32_t kSign = 0x80000000;
inline constexpr std::uint32_t kInfinity = 0x7f800000;  // magnitudes above are NaN

inline std::uint32_t bits_of(float value) {
  return std::bit_cast<std::uint32_t>(value);
}
inline float float_of(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}

inline std::uint32_t either(bool first, std::uint32_t a, std::uint32_t b) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(first);
  return (a & mask) | (b & ~mask);
}

// Clears the lowest bits of a magnitude: to nearest, ties to even. A carry runs into the exponent,
// which is right: the next number up has the next exponent.
template <int kBits>
std::uint32_t round_off_bits(std::uint32_t magnitude) {
  constexpr std::uint32_t kAlmostHalf = (1u << (kBits - 1)) - 1;
  return (magnitude + kAlmostHalf + ((magnitude >> kBits) & 1)) & ~((1u << kBits) - 1);
}

// Finite magnitudes become `finite`, at most `largest`; infinity stays, NaN becomes the quiet one.
inline std::uint32_t saturate(std::uint32_t magnitude, std::uint32_t finite,
                              std::uint32_t largest) {
  const std::uint32_t limited = either(magnitude < largest, finite, largest);
  const std::uint32_t other = either(magnitude == kInfinity, kInfinity, kInfinity | 0x400000);
  return either(magnitude < kInfinity, limited, other);
}

struct Fp32 {
  using Code = std::uint32_t;
  static float round(float value) { return value; }
  static Code narrow(float value) { return bits_of(value); }
  static float widen(Code code) { return float_of(code); }
};

struct Bf16 {
  using Code = std::uint16_t;
  static constexpr std::uint32_t kLargest = 0x7f7f0000;

  static float round(float value) {
    const std::uint32_t magnitude = bits_of(value) & ~kSign;
    return float_of((bits_of(value) & kSign) |
                    saturate(magnitude, round_off_bits<16>(magnitude), kLargest));
  }
  static Code narrow(float value) { return static_cast<Code>(bits_of(value) >> 16); }
  static float widen(Code code) { return float_of(static_cast<std::uint32_t>(code) << 16); }
};

struct Fp16 {
  using Code = std::uint16_t;
  static constexpr std::uint32_t kLargest = 0x477fe000;         // 65504
  static constexpr std::uint32_t kSmallestNormal = 0x38800000;  // 2^-14
  static constexpr std::uint32_t kRebias = (127 - 15) << 10;    // of exponents, in fp16's place

  // Below 2^-14 steps are 2^-24 wide, as those of floats from 0.5 on: adding 0.5 rounds to them.
  static float round(float value) {
    const std::uint32_t magnitude = bits_of(value) & ~kSign;
    const std::uint32_t small = bits_of((float_of(magnitude) + 0.5f) - 0.5f);
    const std::uint32_t finite =
        either(magnitude < kSmallestNormal, small, round_off_bits<13>(magnitude));
    return float_of((bits_of(value) & kSign) | saturate(magnitude, finite, kLargest));
  }

  static Code narrow(float value) {
    const std::uint32_t magnitude = bits_of(value) & ~kSign;
    const std::uint32_t small = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    const std::uint32_t normal = (magnitude >> 13) - kRebias;
    const std::uint32_t finite = either(magnitude < kSmallestNormal, small, normal);
    const std::uint32_t code = either(magnitude < kInfinity, finite, (magnitude >> 13) & 0x7fff);
    return static_cast<Code>(code | ((bits_of(value) & kSign) >> 16));
  }

  static float widen(Code code) {
    const std::uint32_t magnitude = code & 0x7fffu;
    const std::uint32_t small = bits_of(static_cast<float>(magnitude) * 0x1p-24f);
    const std::uint32_t normal = (magnitude + kRebias) << 13;
    const std::uint32_t finite = either(magnitude < 0x0400, small, normal);
    const std::uint32_t bits = either(magnitude < 0x7c00, finite, kInfinity | (magnitude << 13));
    return float_of(bits | (static_cast<std::uint32_t>(code & 0x8000u) << 16));
  }
};

template <class Kind>
bool encode_floats(std::span<const float> values, std::byte* out, float* rounded) {
  using Code = typename Kind::Code;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float value = Kind::round(values[i]);
    store(out + i * sizeof(Code), Kind::narrow(value));
    rounded[i] = value;
  }
  return true;
}

template <class Kind>
void decode_floats(const std::byte* in, std::span<float> values) {
  using Code = typename Kind::Code;
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = Kind::widen(load<Code>(in + i * sizeof(Code)));
  }
}

}  // namespace topreduce::wire::formats
