// What bf16.cpp and fp16.cpp share, once for every instruction set.

#if defined(TOPREDUCE_WIRE_FORMATS_FLOATS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TOPREDUCE_WIRE_FORMATS_FLOATS_INL_H
#undef TOPREDUCE_WIRE_FORMATS_FLOATS_INL_H
#else
#define TOPREDUCE_WIRE_FORMATS_FLOATS_INL_H
#endif

#include <hwy/highway.h>

#include "topreduce/wire/formats/floats.h"

HWY_BEFORE_NAMESPACE();
namespace topreduce::wire::formats {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR

template <class Kind>
bool encode_halves(std::span<const float> values, std::byte* out, float* rounded) {
  return encode_floats<typename Kind::Scalar>(values, out, rounded);
}

template <class Kind>
void decode_halves(const std::byte* in, std::span<float> values) {
  decode_floats<typename Kind::Scalar>(in, values);
}

#else
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using Bits = hn::RebindToSigned<Floats>;  // magnitudes have no sign, and order like their bits
using Halves = hn::Rebind<std::uint16_t, Floats>;
using HalfBytes = hn::Repartition<std::uint8_t, Halves>;
using FloatVector = hn::Vec<Floats>;
using BitVector = hn::Vec<Bits>;

/// As the scalar ones, see there.
template <int kBits>
HWY_INLINE BitVector round_off_bits(BitVector magnitude) {
  const Bits d;
  const auto odd = hn::And(hn::ShiftRight<kBits>(magnitude), hn::Set(d, 1));
  const auto up = hn::Add(magnitude, hn::Add(odd, hn::Set(d, (1 << (kBits - 1)) - 1)));
  return hn::And(up, hn::Set(d, ~((1 << kBits) - 1)));
}

HWY_INLINE BitVector saturate(BitVector magnitude, BitVector finite, std::uint32_t largest) {
  const Bits d;
  const auto infinity = hn::Set(d, static_cast<std::int32_t>(kInfinity));
  const auto most = hn::Set(d, static_cast<std::int32_t>(largest));
  const auto limited = hn::IfThenElse(hn::Lt(magnitude, most), finite, most);
  const auto quiet = hn::Or(infinity, hn::Set(d, 0x400000));
  const auto other = hn::IfThenElse(hn::Eq(magnitude, infinity), infinity, quiet);
  return hn::IfThenElse(hn::Lt(magnitude, infinity), limited, other);
}

/// Whole vectors with `round` and `narrow` of `Kind`, the rest as its `Scalar` does it.
template <class Kind>
HWY_INLINE bool encode_halves(std::span<const float> values, std::byte* out, float* rounded) {
  const Floats d;
  const Bits bits;
  const std::size_t lanes = hn::Lanes(d);
  const auto sign_bit = hn::Set(bits, static_cast<std::int32_t>(kSign));
  std::size_t i = 0;
  for (; i + lanes <= values.size(); i += lanes) {
    const auto value = hn::BitCast(bits, hn::LoadU(d, values.data() + i));
    const auto sign = hn::And(value, sign_bit);
    const auto magnitude = Kind::round(hn::AndNot(sign_bit, value));
    const auto half_sign = hn::And(hn::ShiftRight<16>(sign), hn::Set(bits, 0x8000));
    const auto code = hn::DemoteTo(Halves(), hn::Or(Kind::narrow(magnitude), half_sign));
    hn::StoreU(hn::BitCast(HalfBytes(), code), HalfBytes(),
               reinterpret_cast<std::uint8_t*>(out + 2 * i));
    hn::StoreU(hn::BitCast(d, hn::Or(magnitude, sign)), d, rounded + i);
  }
  return encode_floats<typename Kind::Scalar>(values.subspan(i), out + 2 * i, rounded + i);
}

/// The reverse, with `widen`.
template <class Kind>
HWY_INLINE void decode_halves(const std::byte* in, std::span<float> values) {
  const Floats d;
  const Bits bits;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= values.size(); i += lanes) {
    const auto code = hn::BitCast(
        Halves(), hn::LoadU(HalfBytes(), reinterpret_cast<const std::uint8_t*>(in + 2 * i)));
    hn::StoreU(hn::BitCast(d, Kind::widen(hn::PromoteTo(bits, code))), d, values.data() + i);
  }
  decode_floats<typename Kind::Scalar>(in + 2 * i, values.subspan(i));
}

#endif  // HWY_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace topreduce::wire::formats
HWY_AFTER_NAMESPACE();

#endif
