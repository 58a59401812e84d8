#include "topreduce/wire/values.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "topreduce/wire/little_endian.h"

namespace topreduce::wire {
namespace {

constexpr std::uint32_t kInfinity = 0x7f800000;  // bits of a float; anything above is NaN

// Drops the lowest bits of a magnitude: to nearest, ties to even. A carry runs into the exponent,
// which is right: the next number up has the next exponent.
template <int kBits>
std::uint32_t drop_bits(std::uint32_t magnitude) {
  return (magnitude + (1u << (kBits - 1)) - 1 + ((magnitude >> kBits) & 1)) >> kBits;
}

// Both codecs choose between values instead of jumping, so that their loops become vector code.

struct Fp32 {
  using Code = std::uint32_t;
  static Code encode(float value) { return std::bit_cast<Code>(value); }
  static float decode(Code code) { return std::bit_cast<float>(code); }
};

struct Bf16 {
  using Code = std::uint16_t;

  static Code encode(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7fffffff;
    std::uint32_t code = std::min(drop_bits<16>(magnitude), 0x7f7fu);
    code = magnitude == kInfinity ? 0x7f80 : code;
    code = magnitude > kInfinity ? 0x7fc0 : code;
    return static_cast<Code>(code | ((bits >> 16) & 0x8000));
  }

  static float decode(Code code) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 16);
  }
};

struct Fp16 {
  using Code = std::uint16_t;
  static constexpr std::uint32_t kRebias = (127 - 15) << 10;  // of exponents, in fp16's place

  static Code encode(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7fffffff;
    std::uint32_t code = std::min(drop_bits<13>(magnitude) - kRebias, 0x7bffu);
    // Below 2^-14 steps are 2^-24 wide, just as those of floats from 0.5 on: the sum rounds for us.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    const std::uint32_t small = std::bit_cast<std::uint32_t>(shifted) - kHalf;
    code = magnitude < kSmallestNormal ? small : code;
    code = magnitude == kInfinity ? 0x7c00 : code;
    code = magnitude > kInfinity ? 0x7e00 : code;
    return static_cast<Code>(code | ((bits >> 16) & 0x8000));
  }

  static float decode(Code code) {
    const std::uint32_t magnitude = code & 0x7fffu;
    const std::uint32_t normal = (magnitude + kRebias) << 13;
    const auto small = std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24f);
    std::uint32_t bits = magnitude < 0x0400 ? small : normal;
    bits = magnitude >= 0x7c00 ? kInfinity | (magnitude << 13) : bits;
    return std::bit_cast<float>(bits | (static_cast<std::uint32_t>(code & 0x8000u) << 16));
  }

 private:
  static constexpr auto kHalf = std::bit_cast<std::uint32_t>(0.5f);
  static constexpr auto kSmallestNormal = std::bit_cast<std::uint32_t>(0x1p-14f);
};

template <class Codec>
void encode_all(std::span<float> values, std::byte* out) {
  using Code = typename Codec::Code;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Code code = Codec::encode(values[i]);
    values[i] = Codec::decode(code);
    store(out + i * sizeof(Code), code);
  }
}

template <class Codec>
void decode_all(const std::byte* in, std::span<float> values) {
  using Code = typename Codec::Code;
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = Codec::decode(load<Code>(in + i * sizeof(Code)));
  }
}

/// Calls `use` with the codec of `encoding`.
template <class Use>
auto with_codec(Values encoding, Use use) {
  switch (encoding) {
    case Values::fp32: return use(Fp32{});
    case Values::bf16: return use(Bf16{});
    case Values::fp16: return use(Fp16{});
  }
  throw std::invalid_argument("values: no encoding has the number " +
                              std::to_string(static_cast<int>(encoding)));
}

}  // namespace

std::size_t width(Values encoding) {
  return with_codec(encoding, []<class Codec>(Codec) { return sizeof(typename Codec::Code); });
}

void encode_values(Values encoding, std::span<float> values, std::byte* out) {
  with_codec(encoding, [&]<class Codec>(Codec) { encode_all<Codec>(values, out); });
}

void decode_values(Values encoding, const std::byte* in, std::span<float> values) {
  with_codec(encoding, [&]<class Codec>(Codec) { decode_all<Codec>(in, values); });
}

}  // namespace topreduce::wire
