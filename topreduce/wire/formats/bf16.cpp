// bf16: the upper half of a float.

#include "topreduce/wire/formats/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "topreduce/wire/formats/bf16.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "topreduce/wire/formats/floats-inl.h"

HWY_BEFORE_NAMESPACE();
namespace topreduce::wire::formats {
namespace HWY_NAMESPACE {

struct Bf16Vectors {
  using Scalar = Bf16;
#if HWY_TARGET != HWY_SCALAR
  static HWY_INLINE BitVector round(BitVector magnitude) {
    return saturate(magnitude, round_off_bits<16>(magnitude), Bf16::kLargest);
  }
  static HWY_INLINE BitVector narrow(BitVector magnitude) {
    return hn::ShiftRight<16>(magnitude);
  }
  static HWY_INLINE BitVector widen(BitVector code) {
    return hn::ShiftLeft<16>(code);
  }
#endif
};

bool encode_bf16(std::span<const float> values, std::byte* out, float* rounded) {
  return encode_halves<Bf16Vectors>(values, out, rounded);
}

void decode_bf16(const std::byte* in, std::span<float> values) {
  decode_halves<Bf16Vectors>(in, values);
}

}  // namespace HWY_NAMESPACE
}  // namespace topreduce::wire::formats
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace topreduce::wire::formats {
TOPREDUCE_VECTOR_CODEC(bf16, encode_floats<Bf16>, decode_floats<Bf16>)
}
#endif
