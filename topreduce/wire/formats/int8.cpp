// int8: -127 .. 127 times a scale, the largest magnitude of 64 values / 127.

#include <cstring>

#include "topreduce/wire/formats/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "topreduce/wire/formats/int8.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "topreduce/wire/formats/blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace topreduce::wire::formats {
namespace HWY_NAMESPACE {

struct Octets {
  static constexpr unsigned kBits = 8;
  static HWY_INLINE void pack(const std::int8_t* codes, std::byte* out) {
    std::memcpy(out, codes, kBlockValues);
  }
  static HWY_INLINE void unpack(const std::byte* in, std::int8_t* codes) {
    std::memcpy(codes, in, kBlockValues);
  }
};

bool encode_int8(std::span<const float> values, std::byte* out, float* rounded) {
  return encode_multiples_of_scales<Octets>(values, out, rounded);
}

void decode_int8(const std::byte* in, std::span<float> values) {
  decode_multiples_of_scales<Octets>(in, values);
}

}  // namespace HWY_NAMESPACE
}  // namespace topreduce::wire::formats
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace topreduce::wire::formats {
TOPREDUCE_VECTOR_CODEC(int8, encode_scaled_blocks<8>, decode_scaled_blocks<8>)
}
#endif
