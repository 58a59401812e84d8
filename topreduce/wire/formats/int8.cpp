// int8: -127 .. 127 times a scale, the largest magnitude of 64 values / 127.

#include <cstring>

#include "topreduce/wire/formats/blocks.h"
#include "topreduce/wire/formats/format.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "topreduce/wire/formats/int8.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "topreduce/wire/formats/blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace topreduce::wire::formats {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR
using scalar::decode_int8;
using scalar::encode_int8;
#else

bool encode_int8(std::span<const float> values, std::byte* out, float* rounded) {
  bool finite = true;
  const std::size_t done = encode_whole_blocks<8>(
      values, out, rounded, finite, [](const std::int8_t* codes, std::byte* to) HWY_ATTR {
        std::memcpy(to, codes, kBlockValues);
      });
  out += done / kBlockValues * block_bytes(8, kBlockValues);
  return scalar::encode_int8(values.subspan(done), out, rounded + done) && finite;
}

void decode_int8(const std::byte* in, std::span<float> values) {
  const std::size_t done =
      decode_whole_blocks<8>(in, values, [](const std::byte* from, std::int8_t* codes) HWY_ATTR {
        std::memcpy(codes, from, kBlockValues);
      });
  in += done / kBlockValues * block_bytes(8, kBlockValues);
  scalar::decode_int8(in, values.subspan(done));
}

#endif
}  // namespace HWY_NAMESPACE
}  // namespace topreduce::wire::formats
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace topreduce::wire::formats {

namespace scalar {

bool encode_int8(std::span<const float> values, std::byte* out, float* rounded) {
  return encode_scaled_blocks<8>(values, out, rounded);
}

void decode_int8(const std::byte* in, std::span<float> values) {
  decode_scaled_blocks<8>(in, values);
}

}  // namespace scalar

HWY_EXPORT(encode_int8);
HWY_EXPORT(decode_int8);

bool encode_int8(std::span<const float> values, std::byte* out, float* rounded) {
  if constexpr (!kLittleEndian) return scalar::encode_int8(values, out, rounded);
  return HWY_DYNAMIC_DISPATCH(encode_int8)(values, out, rounded);
}

void decode_int8(const std::byte* in, std::span<float> values) {
  if constexpr (!kLittleEndian) return scalar::decode_int8(in, values);
  HWY_DYNAMIC_DISPATCH(decode_int8)(in, values);
}

}  // namespace topreduce::wire::formats
#endif  // HWY_ONCE
