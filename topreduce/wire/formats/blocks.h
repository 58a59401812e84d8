#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "topreduce/errors.h"
#include "topreduce/wire/formats/floats.h"
#include "topreduce/wire/little_endian.h"

// Values in few bits: 64 values share a scale. A block is its scale as bf16, then a code per value,
// from the lowest bits of each byte up; the last byte is filled with zeros. Codes are to be
// multiplied with the scale; each format says what they stand for.
//
// Scales have 8 significant bits, so products with whole numbers are exact, and a value minus what
// it is rounded to is a float too: what is owed is owed to the bit.
//
// Loops run over 64 values, zeros behind the last one, so that they become vector code. No sum
// depends on how wide the vectors are.

namespace topreduce::wire::formats {

inline constexpr std::size_t kBlockValues = 64;

using Block = std::array<float, kBlockValues>;
using Codes = std::array<std::uint8_t, kBlockValues>;

constexpr std::size_t block_bytes(unsigned bits, std::size_t count) {
  return 2 + (bits * count + 7) / 8;
}

/// The bits of the largest magnitude, which order like magnitudes.
inline std::uint32_t largest_of(const Block& magnitudes) {
  std::array<std::uint32_t, 8> largest{};
  for (std::size_t i = 0; i < kBlockValues; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) {
      largest[j] = std::max(largest[j], bits_of(magnitudes[i + j]));
    }
  }
  return *std::ranges::max_element(largest);
}

/// Of `count` magnitudes: sums over every eighth value, then halves onto halves. A 64th each, so
/// that nothing overflows.
inline float mean_of(const Block& magnitudes, std::size_t count) {
  std::array<float, 8> sums{};
  for (std::size_t i = 0; i < kBlockValues; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) sums[j] += magnitudes[i + j] * 0x1p-6f;
  }
  for (std::size_t half = 4; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  return sums[0] * (static_cast<float>(kBlockValues) / static_cast<float>(count));
}

/// Times the largest code it is finite.
template <unsigned bits>
inline constexpr float kLargestScale = 0x1.fep127f / (1 << (bits - 1));

template <unsigned bits>
float scale_of(float wanted) {
  return Bf16::round(std::min(wanted, kLargestScale<bits>));
}

/// To the nearest code, ties to even. A value below half the scale becomes 0: a quotient is rounded
/// to one half at most. Adding 2^23 leaves no room for fractions.
inline void to_nearest(const Block& magnitudes, float scale, float largest, Block& codes) {
  if (scale == 0) return codes.fill(0);
  for (std::size_t i = 0; i < kBlockValues; ++i) {
    codes[i] = (std::min(magnitudes[i] / scale, largest) + 0x1p23f) - 0x1p23f;
  }
}

/// Codes side by side: `bits` of each, the first in the lowest.
template <unsigned bits>
void pack_codes(const Codes& codes, std::size_t count, std::byte* out) {
  constexpr unsigned kPerByte = 8 / bits;
  std::array<std::uint8_t, kBlockValues / kPerByte> bytes;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    unsigned byte = 0;
    for (unsigned j = 0; j < kPerByte; ++j) byte |= unsigned{codes[i * kPerByte + j]} << bits * j;
    bytes[i] = static_cast<std::uint8_t>(byte);
  }
  std::copy_n(reinterpret_cast<const std::byte*>(bytes.data()), (bits * count + 7) / 8, out);
}

template <unsigned bits>
void unpack_codes(const std::byte* in, std::size_t count, Codes& codes) {
  constexpr unsigned kPerByte = 8 / bits;
  std::array<std::uint8_t, kBlockValues / kPerByte> bytes{};
  std::copy_n(in, (bits * count + 7) / 8, reinterpret_cast<std::byte*>(bytes.data()));
  for (std::size_t i = 0; i < kBlockValues; ++i) {
    codes[i] = static_cast<std::uint8_t>(bytes[i / kPerByte] >> bits * (i % kPerByte) &
                                         ((1u << bits) - 1));
  }
}

/// Throws WireError for a scale that no block has.
template <unsigned bits>
float read_scale(std::uint16_t code) {
  const float scale = Bf16::widen(code);
  if (!(scale >= 0 && scale <= kLargestScale<bits>) || std::signbit(scale)) {
    throw WireError("message: a scale is " + std::to_string(scale) + ", expected 0 to " +
                    std::to_string(kLargestScale<bits>));
  }
  return scale;
}

/// Calls encode_block(values, magnitudes, largest, count, out, rounded) with every block of a run,
/// filled with zeros. A block with an infinity or NaN becomes zeros, and the answer is false.
template <unsigned bits, class EncodeBlock>
bool encode_blocks(std::span<const float> values, std::byte* out, float* rounded,
                   EncodeBlock&& encode_block) {
  bool finite = true;
  for (std::size_t start = 0; start < values.size(); start += kBlockValues) {
    const std::size_t count = std::min(kBlockValues, values.size() - start);
    Block block{}, magnitudes, read{};
    std::copy_n(values.data() + start, count, block.data());
    for (std::size_t i = 0; i < kBlockValues; ++i) magnitudes[i] = std::abs(block[i]);
    const std::uint32_t largest = largest_of(magnitudes);
    if (largest < kInfinity) {
      encode_block(block, magnitudes, float_of(largest), count, out, read);
    } else {
      std::fill_n(out, block_bytes(bits, count), std::byte{0});
      finite = false;
    }
    std::copy_n(read.data(), count, rounded + start);
    out += block_bytes(bits, count);
  }
  return finite;
}

/// Calls decode_block(in, block of values) with every block of a run.
template <unsigned bits, class DecodeBlock>
void decode_blocks(const std::byte* in, std::span<float> values, DecodeBlock&& decode_block) {
  for (std::size_t start = 0; start < values.size(); start += kBlockValues) {
    const std::size_t count = std::min(kBlockValues, values.size() - start);
    decode_block(in, values.subspan(start, count));
    in += block_bytes(bits, count);
  }
}

// ---- codes that are whole numbers in two's complement
// ---------------------------------------------
// --------------------------------------------

template <unsigned bits>
inline constexpr float kLargestCode = (1 << (bits - 1)) - 1;

template <unsigned bits>
int whole_number(std::uint8_t code) {
  return static_cast<std::int8_t>(code << (8 - bits)) >> (8 - bits);
}

/// The nearest multiple of the scale.
template <unsigned bits>
void encode_multiples(const Block& values, const Block& magnitudes, float scale, std::size_t count,
                      std::byte* out, Block& rounded) {
  Block wanted;
  Codes codes;
  to_nearest(magnitudes, scale, kLargestCode<bits>, wanted);
  for (std::size_t i = 0; i < kBlockValues; ++i) {
    const auto magnitude = static_cast<unsigned>(static_cast<int>(wanted[i]));
    const unsigned sign = bits_of(values[i]) >> 31;
    codes[i] = static_cast<std::uint8_t>(((magnitude ^ (0u - sign)) + sign) & ((1u << bits) - 1));
    rounded[i] = static_cast<float>(whole_number<bits>(codes[i])) * scale;
  }
  store(out, Bf16::narrow(scale));
  pack_codes<bits>(codes, count, out + 2);
}

template <unsigned bits>
void decode_multiples(const std::byte* in, float scale, std::span<float> values) {
  Codes codes;
  unpack_codes<bits>(in + 2, values.size(), codes);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(whole_number<bits>(codes[i])) * scale;
  }
}

/// A run of blocks whose scale is the largest magnitude / the largest code.
template <unsigned bits>
bool encode_scaled_blocks(std::span<const float> values, std::byte* out, float* rounded) {
  return encode_blocks<bits>(values, out, rounded,
                             [](const Block& block, const Block& magnitudes, float largest,
                                std::size_t count, std::byte* to, Block& read) {
                               const float scale = scale_of<bits>(largest / kLargestCode<bits>);
                               encode_multiples<bits>(block, magnitudes, scale, count, to, read);
                             });
}

template <unsigned bits>
void decode_scaled_blocks(const std::byte* in, std::span<float> values) {
  decode_blocks<bits>(in, values, [](const std::byte* from, std::span<float> block) {
    const auto scale = read_scale<bits>(load<std::uint16_t>(from));
    decode_multiples<bits>(from, scale, block);
  });
}

}  // namespace topreduce::wire::formats
