#pragma once

#include <cstddef>
#include <span>

#include "topreduce/wire/message.h"

namespace topreduce::wire {

/// Bytes that one value takes. Throws std::invalid_argument for an encoding that does not exist.
std::size_t width(Values encoding);

/// Writes `values` to [out, out + size * width) and rounds them to what `decode_values` reads.
/// bf16 and fp16 round to nearest, ties to even; what is too large for them becomes their largest
/// finite value, so that the difference can stay owed. Infinity stays infinity, NaN stays NaN.
void encode_values(Values encoding, std::span<float> values, std::byte* out);

void decode_values(Values encoding, const std::byte* in, std::span<float> values);

}  // namespace topreduce::wire
