#pragma once

#include <cstddef>
#include <span>

#include "topreduce/sparse_vector.h"

// Ascending indices as the gaps between them, 7 bits to a byte, lowest first, the high bit set
// while more follow. The first index counts from 0, each later one from the one before, plus 1.

namespace topreduce::wire {

inline constexpr std::size_t kLargestGapBytes = 5;

/// Writes `indices` (ascending, below 2^32 - 1) from `out` on and returns the end of what it wrote.
/// There must be room for kLargestGapBytes for each.
std::byte* encode_gaps(std::span<const Index> indices, std::byte* out);

/// Reads indices.size() indices, which must take up all of `bytes`. Throws WireError unless they
/// are ascending and below `universe`.
void decode_gaps(std::span<const std::byte> bytes, Index universe, std::span<Index> indices);

}  // namespace topreduce::wire
