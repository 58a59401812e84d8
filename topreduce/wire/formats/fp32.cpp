// fp32: as it is.

#include <cstring>

#include "topreduce/wire/formats/floats.h"
#include "topreduce/wire/formats/format.h"

namespace topreduce::wire::formats {

namespace scalar {

bool encode_fp32(std::span<const float> values, std::byte* out, float* rounded) {
  encode_floats<Fp32>(values, out, rounded);
  return true;
}

void decode_fp32(const std::byte* in, std::span<float> values) {
  decode_floats<Fp32>(in, values);
}

}  // namespace scalar

bool encode_fp32(std::span<const float> values, std::byte* out, float* rounded) {
  if constexpr (!kLittleEndian) return scalar::encode_fp32(values, out, rounded);
  if (values.empty()) return true;
  std::memcpy(out, values.data(), values.size_bytes());
  if (rounded != values.data()) std::memmove(rounded, values.data(), values.size_bytes());
  return true;
}

void decode_fp32(const std::byte* in, std::span<float> values) {
  if constexpr (!kLittleEndian) return scalar::decode_fp32(in, values);
  if (!values.empty()) std::memcpy(values.data(), in, values.size_bytes());
}

}  // namespace topreduce::wire::formats
