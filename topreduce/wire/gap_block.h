#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "topreduce/sparse_vector.h"

// The hot loops of rice.h, on blocks of 256 gaps. Each has a Highway body for every instruction set
// and a scalar reference that it equals bit for bit.

namespace topreduce::wire {

inline constexpr std::size_t kBlockGaps = 256;

/// A block whose gaps add up to less than 2^32 has no better parameter than this.
inline constexpr unsigned kMostParameter = 24;

/// Positions that find_ones may write behind those it is asked for.
inline constexpr std::size_t kOnesSlack = 64;

/// Bytes of the low parts of a block.
constexpr std::size_t low_bytes(unsigned parameter) {
  return kBlockGaps / 8 * parameter;
}

/// Of the parameters guess, guess + 1 and guess + 2 the one for which Rice codes of 256 gaps are
/// the shortest, the smallest of equals.
unsigned best_parameter(const Index* gaps, unsigned guess);

/// The lowest `parameter` bits of 256 gaps, at most kMostParameter. Eight bit strings side by side,
/// in words of 32 bits: gap j belongs to string j % 8, and word w of string s is word 8 w + s.
void pack_lows(const Index* gaps, unsigned parameter, std::byte* out);

/// The places of the next ones in `bytes`, from bit `start` on and counted from there, until there
/// are `count` of them. Returns the bit behind the last one, or kNoOnes if there are too few.
std::uint64_t find_ones(std::span<const std::byte> bytes, std::uint64_t start, std::size_t count,
                        std::uint32_t* places);
inline constexpr std::uint64_t kNoOnes = ~std::uint64_t{0};

/// Puts 256 gaps together and adds them up: indices[j] = first + j + the gaps up to j, where those
/// have the quotients ones[j] - j in all, and the low parts that pack_lows wrote. Returns the sum
/// of all low parts. Indices that do not fit into 32 bits wrap round.
std::uint32_t join_gaps(const std::uint32_t* ones, const std::byte* lows, unsigned parameter,
                        Index first, Index* indices);

namespace scalar {
unsigned best_parameter(const Index* gaps, unsigned guess);
void pack_lows(const Index* gaps, unsigned parameter, std::byte* out);
std::uint64_t find_ones(std::span<const std::byte> bytes, std::uint64_t start, std::size_t count,
                        std::uint32_t* places);
std::uint32_t join_gaps(const std::uint32_t* ones, const std::byte* lows, unsigned parameter,
                        Index first, Index* indices);
}  // namespace scalar

}  // namespace topreduce::wire
