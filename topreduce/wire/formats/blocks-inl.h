// Blocks whose codes are whole numbers, once for every instruction set: what int8.cpp and int4.cpp
// share. The plain reading is in blocks.h.

#if defined(TOPREDUCE_WIRE_FORMATS_BLOCKS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TOPREDUCE_WIRE_FORMATS_BLOCKS_INL_H
#undef TOPREDUCE_WIRE_FORMATS_BLOCKS_INL_H
#else
#define TOPREDUCE_WIRE_FORMATS_BLOCKS_INL_H
#endif

#include <hwy/highway.h>

#include "topreduce/wire/formats/blocks.h"

#if HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace topreduce::wire::formats {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using BlockFloats = hn::CappedTag<float, 16>;
using BlockInts = hn::RebindToSigned<BlockFloats>;
using BlockCodes = hn::Rebind<std::int8_t, BlockFloats>;

/// Codes of 64 values, and the values they stand for. As in blocks.h, pass by pass.
HWY_INLINE void to_multiples(const float* values, float scale, float largest, std::int8_t* codes,
                             float* rounded) {
  const BlockFloats d;
  const BlockInts ints;
  const std::size_t lanes = hn::Lanes(d);
  const auto scales = hn::Set(d, scale), most = hn::Set(d, largest);
  for (std::size_t i = 0; i < kBlockValues; i += lanes) {
    const auto value = hn::LoadU(d, values + i);
    const auto quotient = hn::Min(hn::Div(hn::Abs(value), scales), most);
    const auto whole = hn::NearestInt(quotient);
    const auto sign = hn::BroadcastSignBit(hn::BitCast(ints, value));
    const auto code = hn::Sub(hn::Xor(whole, sign), sign);
    hn::StoreU(hn::DemoteTo(BlockCodes(), code), BlockCodes(), codes + i);
    hn::StoreU(hn::Mul(hn::ConvertTo(d, code), scales), d, rounded + i);
  }
}

HWY_INLINE void from_multiples(const std::int8_t* codes, float scale, float* values) {
  const BlockFloats d;
  const BlockInts ints;
  const std::size_t lanes = hn::Lanes(d);
  const auto scales = hn::Set(d, scale);
  for (std::size_t i = 0; i < kBlockValues; i += lanes) {
    const auto code = hn::PromoteTo(ints, hn::LoadU(BlockCodes(), codes + i));
    hn::StoreU(hn::Mul(hn::ConvertTo(d, code), scales), d, values + i);
  }
}

HWY_INLINE std::uint32_t largest_bits(const float* values) {
  const BlockFloats d;
  const BlockInts ints;
  const std::size_t lanes = hn::Lanes(d);
  auto largest = hn::Zero(ints);
  for (std::size_t i = 0; i < kBlockValues; i += lanes) {
    largest = hn::Max(largest, hn::BitCast(ints, hn::Abs(hn::LoadU(d, values + i))));
  }
  return static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(ints, largest)));
}

/// Writes whole blocks; returns how many values that were. pack(codes, out) puts 64 codes side by
/// side.
template <unsigned bits, class Pack>
HWY_INLINE std::size_t encode_whole_blocks(std::span<const float> values, std::byte* out,
                                           float* rounded, bool& finite, Pack&& pack) {
  std::size_t done = 0;
  for (; done + kBlockValues <= values.size(); done += kBlockValues) {
    const float* block = values.data() + done;
    const std::uint32_t largest = largest_bits(block);
    const float scale =
        largest < kInfinity ? scale_of<bits>(float_of(largest) / kLargestCode<bits>) : 0;
    finite = finite && largest < kInfinity;
    store(out, Bf16::narrow(scale));
    if (scale == 0) {
      std::fill_n(out + 2, bits * kBlockValues / 8, std::byte{0});
      std::fill_n(rounded + done, kBlockValues, 0.0f);
    } else {
      alignas(64) std::int8_t codes[kBlockValues];
      to_multiples(block, scale, kLargestCode<bits>, codes, rounded + done);
      pack(codes, out + 2);
    }
    out += block_bytes(bits, kBlockValues);
  }
  return done;
}

/// unpack(in, codes) is the reverse of pack.
template <unsigned bits, class Unpack>
HWY_INLINE std::size_t decode_whole_blocks(const std::byte* in, std::span<float> values,
                                           Unpack&& unpack) {
  std::size_t done = 0;
  for (; done + kBlockValues <= values.size(); done += kBlockValues) {
    alignas(64) std::int8_t codes[kBlockValues];
    const float scale = read_scale<bits>(load<std::uint16_t>(in));
    unpack(in + 2, codes);
    from_multiples(codes, scale, values.data() + done);
    in += block_bytes(bits, kBlockValues);
  }
  return done;
}

}  // namespace HWY_NAMESPACE
}  // namespace topreduce::wire::formats
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#endif
