#pragma once

#include "topreduce/wire/formats/format.h"
#include "topreduce/wire/little_endian.h"

/// Ends the file of a format that has encode_<name> and decode_<name> for every instruction set:
/// of these the best that the machine has, and their scalar reference. (Highway itself must not be
/// included before the file has named itself to it.)
#define TOPREDUCE_VECTOR_CODEC(name, scalar_encode, scalar_decode)              \
  HWY_EXPORT(encode_##name);                                                    \
  HWY_EXPORT(decode_##name);                                                    \
  Codec name() {                                                                \
    if constexpr (!kLittleEndian) {                                             \
      return {scalar_encode, scalar_decode, scalar_encode, scalar_decode};      \
    }                                                                           \
    return {[](std::span<const float> values, std::byte* out, float* rounded) { \
              return HWY_DYNAMIC_DISPATCH(encode_##name)(values, out, rounded); \
            },                                                                  \
            [](const std::byte* in, std::span<float> values) {                  \
              HWY_DYNAMIC_DISPATCH(decode_##name)(in, values);                  \
            },                                                                  \
            scalar_encode, scalar_decode};                                      \
  }
