// fp16: IEEE half precision.

#include "topreduce/wire/formats/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "topreduce/wire/formats/fp16.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "topreduce/wire/formats/floats-inl.h"

HWY_BEFORE_NAMESPACE();
namespace topreduce::wire::formats {
namespace HWY_NAMESPACE {

// Nothing jumps, as in floats.h: both ways are taken and one result is chosen.
struct Fp16Vectors {
  using Scalar = Fp16;
#if HWY_TARGET != HWY_SCALAR
  static HWY_INLINE BitVector round(BitVector magnitude) {
    const Floats d;
    const Bits bits;
    const auto half = hn::Set(d, 0.5f);
    const auto small = hn::BitCast(bits, hn::Sub(hn::Add(hn::BitCast(d, magnitude), half), half));
    const auto normal = hn::Set(bits, static_cast<std::int32_t>(Fp16::kSmallestNormal));
    const auto finite =
        hn::IfThenElse(hn::Lt(magnitude, normal), small, round_off_bits<13>(magnitude));
    return saturate(magnitude, finite, Fp16::kLargest);
  }

  static HWY_INLINE BitVector narrow(BitVector magnitude) {
    const Floats d;
    const Bits bits;
    const auto half = hn::Set(d, 0.5f);
    const auto small = hn::Sub(hn::BitCast(bits, hn::Add(hn::BitCast(d, magnitude), half)),
                               hn::BitCast(bits, half));
    const auto top = hn::ShiftRight<13>(magnitude);
    const auto normal = hn::Sub(top, hn::Set(bits, static_cast<std::int32_t>(Fp16::kRebias)));
    const auto smallest = hn::Set(bits, static_cast<std::int32_t>(Fp16::kSmallestNormal));
    const auto finite = hn::IfThenElse(hn::Lt(magnitude, smallest), small, normal);
    const auto infinity = hn::Set(bits, static_cast<std::int32_t>(kInfinity));
    const auto other = hn::And(top, hn::Set(bits, 0x7fff));
    return hn::IfThenElse(hn::Lt(magnitude, infinity), finite, other);
  }

  static HWY_INLINE BitVector widen(BitVector code) {
    const Floats d;
    const Bits bits;
    const auto magnitude = hn::And(code, hn::Set(bits, 0x7fff));
    const auto small =
        hn::BitCast(bits, hn::Mul(hn::ConvertTo(d, magnitude), hn::Set(d, 0x1p-24f)));
    const auto rebias = hn::Set(bits, static_cast<std::int32_t>(Fp16::kRebias));
    const auto normal = hn::ShiftLeft<13>(hn::Add(magnitude, rebias));
    const auto finite = hn::IfThenElse(hn::Lt(magnitude, hn::Set(bits, 0x0400)), small, normal);
    const auto infinity = hn::Set(bits, static_cast<std::int32_t>(kInfinity));
    const auto other = hn::Or(infinity, hn::ShiftLeft<13>(magnitude));
    const auto value = hn::IfThenElse(hn::Lt(magnitude, hn::Set(bits, 0x7c00)), finite, other);
    return hn::Or(value, hn::ShiftLeft<16>(hn::And(code, hn::Set(bits, 0x8000))));
  }
#endif
};

bool encode_fp16(std::span<const float> values, std::byte* out, float* rounded) {
  return encode_halves<Fp16Vectors>(values, out, rounded);
}

void decode_fp16(const std::byte* in, std::span<float> values) {
  decode_halves<Fp16Vectors>(in, values);
}

}  // namespace HWY_NAMESPACE
}  // namespace topreduce::wire::formats
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace topreduce::wire::formats {
TOPREDUCE_VECTOR_CODEC(fp16, encode_floats<Fp16>, decode_floats<Fp16>)
}
#endif
