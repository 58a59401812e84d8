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

HWY_BEFORE_NAMESPACE();
namespace topreduce::wire::formats {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR

template <class Packing>
bool encode_multiples_of_scales(std::span<const float> values, std::byte* out, float* rounded) {
  return encode_scaled_blocks<Packing::kBits>(values, out, rounded);
}

template <class Packing>
void decode_multiples_of_scales(const std::byte* in, std::span<float> values) {
  decode_scaled_blocks<Packing::kBits>(in, values);
}

#else
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

/// As encode_scaled_blocks: whole blocks with Packing::pack(codes, out), which puts 64 codes side
/// by side, and the rest as there.
template <class Packing>
HWY_INLINE bool encode_multiples_of_scales(std::span<const float> values, std::byte* out,
                                           float* rounded) {
  constexpr unsigned kBits = Packing::kBits;
  bool finite = true;
  std::size_t done = 0;
  for (; done + kBlockValues <= values.size(); done += kBlockValues) {
    const float* block = values.data() + done;
    const std::uint32_t largest = largest_bits(block);
    const float scale =
        largest < kInfinity ? scale_of<kBits>(float_of(largest) / kLargestCode<kBits>) : 0;
    finite = finite && largest < kInfinity;
    store(out, Bf16::narrow(scale));
    if (scale == 0) {
      std::fill_n(out + 2, kBits * kBlockValues / 8, std::byte{0});
      std::fill_n(rounded + done, kBlockValues, 0.0f);
    } else {
      alignas(64) std::int8_t codes[kBlockValues];
      to_multiples(block, scale, kLargestCode<kBits>, codes, rounded + done);
      Packing::pack(codes, out + 2);
    }
    out += block_bytes(kBits, kBlockValues);
  }
  return encode_scaled_blocks<kBits>(values.subspan(done), out, rounded + done) && finite;
}

/// Packing::unpack(in, codes) is the reverse of pack.
template <class Packing>
HWY_INLINE void decode_multiples_of_scales(const std::byte* in, std::span<float> values) {
  constexpr unsigned kBits = Packing::kBits;
  std::size_t done = 0;
  for (; done + kBlockValues <= values.size(); done += kBlockValues) {
    alignas(64) std::int8_t codes[kBlockValues];
    const float scale = read_scale<kBits>(load<std::uint16_t>(in));
    Packing::unpack(in + 2, codes);
    from_multiples(codes, scale, values.data() + done);
    in += block_bytes(kBits, kBlockValues);
  }
  decode_scaled_blocks<kBits>(in, values.subspan(done));
}

#endif  // HWY_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace topreduce::wire::formats
HWY_AFTER_NAMESPACE();

#endif
