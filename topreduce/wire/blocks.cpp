#include "topreduce/wire/blocks.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>

#include "topreduce/wire/floats.h"
#include "topreduce/wire/little_endian.h"

// Everything is done for 64 values, zeros behind the last one, in loops that become vector code. No
// sum depends on how wide the vectors are.

namespace topreduce::wire {
namespace {

using Magnitudes = std::array<float, kBlockValues>;
using Codes = std::array<std::uint8_t, kBlockValues>;

constexpr std::uint16_t kWithoutZero = 0x8000;  // in a scale: the sign bit

// Sums over every eighth value, then halves onto halves. A 64th each, so that nothing overflows.
float mean_of(const Magnitudes& magnitudes, std::size_t count) {
  std::array<float, 8> sums{};
  for (std::size_t i = 0; i < kBlockValues; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) sums[j] += magnitudes[i + j] * 0x1p-6f;
  }
  for (std::size_t half = 4; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  return sums[0] * (static_cast<float>(kBlockValues) / static_cast<float>(count));
}

// Of bit patterns, which ascend as magnitudes do.
float smallest_of(const Magnitudes& magnitudes, std::size_t count) {
  std::array<std::uint32_t, 8> least;
  least.fill(std::bit_cast<std::uint32_t>(magnitudes[0]));
  for (std::size_t i = 0; i + 8 <= count; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) {
      least[j] = std::min(least[j], std::bit_cast<std::uint32_t>(magnitudes[i + j]));
    }
  }
  for (std::size_t i = count / 8 * 8; i < count; ++i) {
    least[0] = std::min(least[0], std::bit_cast<std::uint32_t>(magnitudes[i]));
  }
  return std::bit_cast<float>(*std::ranges::min_element(least));
}

// The largest code times the largest scale is finite.
constexpr float largest_scale(unsigned bits) {
  return bits == 8 ? 0x1.fep120f : bits == 4 ? 0x1.fep124f : bits == 2 ? 0x1.fep126f : 0x1.fep127f;
}

float scale_of(float wanted, unsigned bits) {
  return Bf16::round(std::min(wanted, largest_scale(bits)));
}

// To the nearest code, ties to even. A value below half the scale becomes 0: a quotient is rounded
// to one half at most. Adding 2^23 leaves no room for fractions.
void to_codes(const Magnitudes& magnitudes, float scale, float largest, Magnitudes& codes) {
  if (scale == 0) return codes.fill(0);
  for (std::size_t i = 0; i < kBlockValues; ++i) {
    codes[i] = (std::min(magnitudes[i] / scale, largest) + 0x1p23f) - 0x1p23f;
  }
}

// Codes side by side: `bits` of each, the first in the lowest.
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

// What a code stands for. A code of `bits` in two's complement; without a zero, see the header.
template <unsigned bits>
float level(std::uint8_t code, std::uint16_t without_zero) {
  if constexpr (bits == 1) return code != 0 ? -1.0f : 1.0f;
  const int plain = static_cast<std::int8_t>(code << (8 - bits)) >> (8 - bits);
  if constexpr (bits != 2) return static_cast<float>(plain);
  const int other = (1 + (code & 1)) * (1 - (code & 2));
  return static_cast<float>(without_zero != 0 ? other : plain);
}

template <unsigned bits>
void read_values(const std::byte* in, std::span<float> values) {
  const auto head = load<std::uint16_t>(in);
  const std::uint16_t without_zero = bits == 2 ? head & kWithoutZero : 0;
  const float scale = Bf16::widen(static_cast<std::uint16_t>(head ^ without_zero));
  if (!(scale >= 0 && scale <= largest_scale(bits)) || std::signbit(scale)) {
    throw WireError("message: a scale is " + std::to_string(scale) + ", expected 0 to " +
                    std::to_string(largest_scale(bits)));
  }
  Codes codes;
  unpack_codes<bits>(in + 2, values.size(), codes);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = level<bits>(codes[i], without_zero) * scale;
  }
}

template <unsigned bits>
void write_values(const std::array<float, kBlockValues>& padded, const Magnitudes& magnitudes,
                  float largest, std::span<float> values, std::byte* out) {
  Magnitudes wanted;
  Codes codes;
  std::uint16_t flag = 0;
  float scale;
  if constexpr (bits >= 4) {
    constexpr float kLargestCode = (1 << (bits - 1)) - 1;
    scale = scale_of(largest / kLargestCode, bits);
    to_codes(magnitudes, scale, kLargestCode, wanted);
  } else if constexpr (bits == 2) {
    // Entries that were chosen for their size have no small ones among them: no zero is needed.
    const float mean = std::min(mean_of(magnitudes, values.size()), largest);
    scale = scale_of(0.875f * mean, bits);
    if (scale > 0 && smallest_of(magnitudes, values.size()) >= 0.5f * scale) {
      flag = kWithoutZero;
      for (std::size_t i = 0; i < kBlockValues; ++i) {
        wanted[i] = magnitudes[i] > 1.5f * scale ? 1.0f : 0.0f;
      }
    } else {
      scale = scale_of(1.5f * std::min(mean, 0x1p126f), bits);
      to_codes(magnitudes, scale, 1, wanted);
    }
  } else {
    scale = scale_of(std::min(mean_of(magnitudes, values.size()), largest), bits);
    wanted.fill(0);
  }
  for (std::size_t i = 0; i < kBlockValues; ++i) {
    const auto magnitude = static_cast<unsigned>(static_cast<int>(wanted[i]));
    const unsigned sign = std::bit_cast<std::uint32_t>(padded[i]) >> 31;
    const unsigned signed_code = (magnitude ^ (0u - sign)) + sign;
    const unsigned code = bits == 1 ? sign : flag != 0 ? magnitude | sign << 1 : signed_code;
    codes[i] = static_cast<std::uint8_t>(code & ((1u << bits) - 1));
  }
  if (flag != 0 || bits == 1) {  // no zero: clear what lies behind the last value
    std::fill(codes.begin() + static_cast<std::ptrdiff_t>(values.size()), codes.end(),
              std::uint8_t{0});
  }
  store(out, static_cast<std::uint16_t>(Bf16::narrow(scale) | flag));
  pack_codes<bits>(codes, values.size(), out + 2);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = level<bits>(codes[i], flag) * scale;
}

// Calls `use` with the number of bits as a type.
template <class Use>
void with_bits(Values encoding, Use use) {
  switch (code_bits(encoding)) {
    case 8: return use(std::integral_constant<unsigned, 8>());
    case 4: return use(std::integral_constant<unsigned, 4>());
    case 2: return use(std::integral_constant<unsigned, 2>());
    default: return use(std::integral_constant<unsigned, 1>());
  }
}

}  // namespace

Vote encode_block(Values encoding, std::span<float> values, std::byte* out) {
  std::array<float, kBlockValues> padded{};
  std::ranges::copy(values, padded.begin());
  Magnitudes magnitudes;
  std::array<std::uint32_t, 8> largest{};
  for (std::size_t i = 0; i < kBlockValues; ++i) magnitudes[i] = std::abs(padded[i]);
  for (std::size_t i = 0; i < kBlockValues; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) {
      largest[j] = std::max(largest[j], std::bit_cast<std::uint32_t>(magnitudes[i + j]));
    }
  }
  const float most = std::bit_cast<float>(*std::ranges::max_element(largest));
  if (!std::isfinite(most)) {
    std::ranges::fill(values, 0.0f);
    std::fill_n(out, block_bytes(code_bits(encoding), values.size()), std::byte{0});
    return Vote::no;
  }
  with_bits(encoding, [&]<unsigned bits>(std::integral_constant<unsigned, bits>) {
    write_values<bits>(padded, magnitudes, most, values, out);
  });
  return Vote::yes;
}

void decode_block(Values encoding, const std::byte* in, std::span<float> values) {
  with_bits(encoding, [&]<unsigned bits>(std::integral_constant<unsigned, bits>) {
    read_values<bits>(in, values);
  });
}

}  // namespace topreduce::wire
