#pragma once

#include <cstddef>
#include <span>

#include "topreduce/wire/message.h"

// Values travel in runs: those of one piece. Blocks of 64 that share a scale start anew with every
// run.

namespace topreduce::wire {

/// Bytes that a run takes. Throws std::invalid_argument for an encoding that does not exist.
std::size_t run_bytes(Values encoding, std::size_t count);

/// Writes a run from `out` on, moves `out` behind it, and rounds the values to what `decode_run`
/// reads. bf16 and fp16 round to nearest, ties to even; what is too large for them becomes their
/// largest finite value, so that the difference can stay owed; infinity stays infinity, NaN stays
/// NaN. Encodings with blocks have neither: such a block becomes zeros, and the answer is no.
Vote encode_run(Values encoding, std::span<float> values, std::byte*& out);

void decode_run(Values encoding, const std::byte* in, std::span<float> values);

}  // namespace topreduce::wire
