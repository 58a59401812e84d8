// fp32: as it is.

#include <cstring>

#include "topreduce/wire/formats/floats.h"
#include "topreduce/wire/formats/format.h"

namespace topreduce::wire::formats {
namespace {

bool copy_in(std::span<const float> values, std::byte* out, float* rounded) {
  if (values.empty()) return true;
  std::memcpy(out, values.data(), values.size_bytes());
  if (rounded != values.data()) std::memmove(rounded, values.data(), values.size_bytes());
  return true;
}

void copy_out(const std::byte* in, std::span<float> values) {
  if (!values.empty()) std::memcpy(values.data(), in, values.size_bytes());
}

}  // namespace

Codec fp32() {
  const Codec scalar{encode_floats<Fp32>, decode_floats<Fp32>, encode_floats<Fp32>,
                     decode_floats<Fp32>};
  return kLittleEndian ? Codec{copy_in, copy_out, scalar.encode, scalar.decode} : scalar;
}

}  // namespace topreduce::wire::formats
