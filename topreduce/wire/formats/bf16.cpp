// bf16: the upper half of a float.

#include "topreduce/wire/formats/floats.h"
#include "topreduce/wire/formats/format.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "topreduce/wire/formats/bf16.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "topreduce/wire/formats/floats-inl.h"

HWY_BEFORE_NAMESPACE();
namespace topreduce::wire::formats {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR
using scalar::decode_bf16;
using scalar::encode_bf16;
#else

bool encode_bf16(std::span<const float> values, std::byte* out, float* rounded) {
  const std::size_t done = encode_halves(
      values, out, rounded,
      [](BitVector magnitude)
          HWY_ATTR { return settle_bits(magnitude, clear_bits_of<16>(magnitude), Bf16::kLargest); },
      [](BitVector magnitude) HWY_ATTR { return hn::ShiftRight<16>(magnitude); });
  return scalar::encode_bf16(values.subspan(done), out + 2 * done, rounded + done);
}

void decode_bf16(const std::byte* in, std::span<float> values) {
  const std::size_t done =
      decode_halves(in, values, [](BitVector code) HWY_ATTR { return hn::ShiftLeft<16>(code); });
  scalar::decode_bf16(in + 2 * done, values.subspan(done));
}

#endif
}  // namespace HWY_NAMESPACE
}  // namespace topreduce::wire::formats
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace topreduce::wire::formats {

namespace scalar {

bool encode_bf16(std::span<const float> values, std::byte* out, float* rounded) {
  encode_floats<Bf16>(values, out, rounded);
  return true;
}

void decode_bf16(const std::byte* in, std::span<float> values) {
  decode_floats<Bf16>(in, values);
}

}  // namespace scalar

HWY_EXPORT(encode_bf16);
HWY_EXPORT(decode_bf16);

bool encode_bf16(std::span<const float> values, std::byte* out, float* rounded) {
  if constexpr (!kLittleEndian) return scalar::encode_bf16(values, out, rounded);
  return HWY_DYNAMIC_DISPATCH(encode_bf16)(values, out, rounded);
}

void decode_bf16(const std::byte* in, std::span<float> values) {
  if constexpr (!kLittleEndian) return scalar::decode_bf16(in, values);
  HWY_DYNAMIC_DISPATCH(decode_bf16)(in, values);
}

}  // namespace topreduce::wire::formats
#endif  // HWY_ONCE
