#pragma once

#include <cstddef>
#include <span>

#include "topreduce/errors.h"
#include "topreduce/sparse_vector.h"
#include "topreduce/wire/value_format.h"

// What a message is about, as bytes; what stands before it says for whom it is (seal.h).

namespace topreduce::wire {

/// Where the entries of a message may lie: pieces of the exchange, ascending, known to both sides.
/// A piece lies within one parameter, and nothing that decides how its values are rounded reaches
/// over its bounds: so results do not depend on how parameters are put together into buckets.
struct Piece {
  Index begin, end;
};
using Pieces = std::span<const Piece>;

/// Appends `entries`, which must lie in `pieces`, to `out`. `rounded` becomes what receivers read:
/// values are rounded, and in a piece that travels whole because that is smaller, zeros are left
/// out. It may be `entries` itself. False: a value is not finite, and the format cannot say so.
/// Throws std::invalid_argument, and appends nothing, for entries elsewhere.
bool encode_entries(ValueFormat format, Pieces pieces, const SparseVector& entries, Bytes& out,
                    SparseVector& rounded);

/// Reads a payload of `encode_entries`. Any bytes at all give entries that lie in `pieces` and
/// ascend, or a WireError that says what is wrong; nothing is allocated beyond what the pieces and
/// the length of the payload allow.
void decode_entries(ValueFormat format, Pieces pieces, std::span<const std::byte> payload,
                    SparseVector& entries);

/// Values at places that both sides know, lengths[i] of them in piece i: no index travels, and
/// every value arrives. `rounded` may be `values` itself. False as above.
bool encode_values(ValueFormat format, std::span<const std::size_t> lengths,
                   std::span<const float> values, Bytes& out, std::span<float> rounded);

/// Reads a payload of `encode_values` with the same lengths, exactly values.size() in all.
void decode_values(ValueFormat format, std::span<const std::size_t> lengths,
                   std::span<const std::byte> payload, std::span<float> values);

/// The most bytes that `count` entries take.
std::size_t largest_payload(std::size_t count, std::size_t pieces);

/// Bits that an index takes in a long message, if a share `density` of all places is sent.
double bits_per_index(double density);

}  // namespace topreduce::wire
