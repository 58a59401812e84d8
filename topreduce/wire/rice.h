#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "topreduce/sparse_vector.h"
#include "topreduce/threads.h"

// Ascending indices as the gaps between them, Rice-coded in blocks of 256. A block starts with its
// parameter k in 5 bits; each gap follows as gap >> k zeros, a one, and its lowest k bits. Bits
// fill bytes from the lowest up; the last byte is filled with zeros. With k = 0 this is a bitmap.

namespace topreduce::wire {

/// Room that `count` gaps need, wherever they lie.
constexpr std::size_t most_rice_bytes(std::size_t count) {
  return 5 * count + 16;
}

/// Writes `gaps` from `out` on, where there must be room for most_rice_bytes; returns the end.
std::byte* write_rice(std::span<const Index> gaps, Threads& threads, std::byte* out);

/// Reads indices.size() ascending indices below `places` from the start of `bytes`; returns how
/// many bytes they take. Throws WireError for anything else.
std::size_t read_rice(std::span<const std::byte> bytes, std::uint64_t places,
                      std::span<Index> indices);

}  // namespace topreduce::wire
