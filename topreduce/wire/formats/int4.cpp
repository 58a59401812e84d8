// int4: -7 .. 7 times a scale, the largest magnitude of 64 values / 7.

#include "topreduce/wire/formats/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "topreduce/wire/formats/int4.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "topreduce/wire/formats/blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace topreduce::wire::formats {
namespace HWY_NAMESPACE {

struct Nibbles {
  static constexpr unsigned kBits = 4;
#if HWY_TARGET != HWY_SCALAR
  // Two codes a byte, the first in the lower half.
  static HWY_INLINE void pack(const std::int8_t* codes, std::byte* out) {
    const hn::CappedTag<std::uint16_t, 32> pairs;
    const hn::RebindToSigned<decltype(pairs)> small;
    const hn::Repartition<std::uint8_t, decltype(pairs)> octets;
    const hn::Rebind<std::uint8_t, decltype(pairs)> bytes;
    const std::size_t lanes = hn::Lanes(pairs);
    const auto low = hn::Set(pairs, 0x000f), high = hn::Set(pairs, 0x00f0);
    for (std::size_t i = 0; i < kBlockValues / 2; i += lanes) {
      const auto* place = reinterpret_cast<const std::uint8_t*>(codes) + 2 * i;
      const auto pair = hn::BitCast(pairs, hn::LoadU(octets, place));
      const auto byte = hn::Or(hn::And(pair, low), hn::And(hn::ShiftRight<4>(pair), high));
      hn::StoreU(hn::DemoteTo(bytes, hn::BitCast(small, byte)), bytes,
                 reinterpret_cast<std::uint8_t*>(out) + i);
    }
  }

  // To 16 bits each, then the second code into the upper byte; a code's highest bit is its sign.
  static HWY_INLINE void unpack(const std::byte* in, std::int8_t* codes) {
    const hn::CappedTag<std::uint16_t, 32> pairs;
    const hn::Repartition<std::uint8_t, decltype(pairs)> octets;
    const hn::Rebind<std::uint8_t, decltype(pairs)> bytes;
    const std::size_t lanes = hn::Lanes(pairs);
    const auto mask = hn::Set(pairs, 0x0f0f);
    const auto sign = hn::Set(octets, 8);
    for (std::size_t i = 0; i < kBlockValues / 2; i += lanes) {
      const auto byte =
          hn::PromoteTo(pairs, hn::LoadU(bytes, reinterpret_cast<const std::uint8_t*>(in) + i));
      const auto pair = hn::BitCast(octets, hn::And(hn::Or(byte, hn::ShiftLeft<4>(byte)), mask));
      hn::StoreU(hn::Sub(hn::Xor(pair, sign), sign), octets,
                 reinterpret_cast<std::uint8_t*>(codes) + 2 * i);
    }
  }
#endif
};

bool encode_int4(std::span<const float> values, std::byte* out, float* rounded) {
  return encode_multiples_of_scales<Nibbles>(values, out, rounded);
}

void decode_int4(const std::byte* in, std::span<float> values) {
  decode_multiples_of_scales<Nibbles>(in, values);
}

}  // namespace HWY_NAMESPACE
}  // namespace topreduce::wire::formats
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace topreduce::wire::formats {
TOPREDUCE_VECTOR_CODEC(int4, encode_scaled_blocks<4>, decode_scaled_blocks<4>)
}
#endif
