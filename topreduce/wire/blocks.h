#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "topreduce/wire/message.h"

// Values in few bits: 64 values share a scale. A block is its scale as bf16, then a code per value,
// from the lowest bits of each byte up; the last byte is filled with zeros. Codes are whole numbers
// in two's complement, to be multiplied with the scale:
//
//   int8   -127 .. 127
//   int4   -7 .. 7
//   int2   -1, 0, 1; if the scale's sign bit is set: 1, 2, -1, -2 for the codes 0, 1, 2, 3
//   sign   1, -1 for the codes 0, 1
//
// Scales have 8 significant bits, so products are exact, and a value minus what it is rounded to is
// a float too: what is owed is owed to the bit. (Not so with sign, which has no zero.)

namespace topreduce::wire {

inline constexpr std::size_t kBlockValues = 64;

/// Bits of a code; 0 for encodings without blocks.
constexpr unsigned code_bits(Values encoding) {
  switch (encoding) {
    case Values::int8: return 8;
    case Values::int4: return 4;
    case Values::int2: return 2;
    case Values::sign: return 1;
    default: return 0;
  }
}

/// Bytes of a block of `count` values.
constexpr std::size_t block_bytes(unsigned bits, std::size_t count) {
  return 2 + (bits * count + 7) / 8;
}

/// Writes a block of 1 to 64 values and rounds them to what receivers read. A block with an
/// infinity or NaN becomes zeros, and the answer is no.
Vote encode_block(Values encoding, std::span<float> values, std::byte* out);

/// Throws WireError for a scale that no block has.
void decode_block(Values encoding, const std::byte* in, std::span<float> values);

}  // namespace topreduce::wire
