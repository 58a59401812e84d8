#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "topreduce/wire/value_format.h"

// Values travel in runs: those of one piece. Those that share a scale start anew with every run.

namespace topreduce::wire {

/// Writes a run, exactly run_bytes, from `out` on; rounded[i] becomes what is read again, and may
/// lie in the place of values[i] or before it. Floats round to nearest, ties to even; what is too
/// large becomes their largest finite value, so that the difference can stay owed; infinity stays
/// infinity, NaN stays NaN. Formats with scales have neither: such a block becomes zeros, and the
/// answer is false.
using Encode = bool (*)(std::span<const float> values, std::byte* out, float* rounded);
/// Reads it. Throws WireError for a scale that no block has.
using Decode = void (*)(const std::byte* in, std::span<float> values);

struct Codec {
  Encode encode;
  Decode decode;
  Encode scalar_encode;  ///< what `encode` must equal on every target
  Decode scalar_decode;
};

/// A row of formats.def with its functions.
struct Format : Codec {
  std::string_view name;
  unsigned bits;  ///< of a code
  std::size_t values_per_scale;
  bool has_zero;

  std::size_t run_bytes(std::size_t count) const {
    const auto codes = [this](std::size_t values) { return (bits * values + 7) / 8; };
    if (values_per_scale == 1) return codes(count);
    const std::size_t rest = count % values_per_scale;
    return count / values_per_scale * (2 + codes(values_per_scale)) +
           (rest > 0 ? 2 + codes(rest) : 0);
  }
};

/// Throws std::invalid_argument for a number that no row has.
const Format& format_of(ValueFormat values);

namespace formats {
// Each in a file of its own.
#define FORMAT(name, ...) Codec name();
#include "topreduce/wire/formats.def"
#undef FORMAT
}  // namespace formats

}  // namespace topreduce::wire
