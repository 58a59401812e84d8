#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "topreduce/sparse_vector.h"

// Ascending indices as the gaps between them, Rice-coded in blocks of 256. A block starts with its
// parameter k in 5 bits; each gap follows as gap >> k zeros, a one, and its lowest k bits. Bits
// fill bytes from the lowest up; the last byte is filled with zeros. With k = 0 this is a bitmap.

namespace topreduce::wire {

/// Writes gaps one by one.
class RiceWriter {
 public:
  /// Room that `count` indices need, wherever they lie.
  static constexpr std::size_t most_bytes(std::size_t count) { return 5 * count + 16; }

  /// Writes from `out` on, where there must be room for most_bytes.
  explicit RiceWriter(std::byte* out) : out_(out) {}

  void push(Index gap) {
    gaps_[count_++] = gap;
    if (count_ == gaps_.size()) write_block();
  }
  /// Returns the end of what was written.
  std::byte* finish();

 private:
  void write_block();
  unsigned best_parameter() const;
  std::uint64_t bits_with(unsigned parameter) const;
  void put(std::uint64_t bits, unsigned count);
  void put_zeros(std::uint64_t count);

  std::byte* out_;
  std::uint64_t pending_ = 0;  // bits not yet written ...
  unsigned filled_ = 0;        // ... and how many, fewer than 8 between puts
  std::array<Index, 256> gaps_;
  std::size_t count_ = 0;
};

/// Reads indices.size() ascending indices below `places` from the start of `bytes`; returns how
/// many bytes they take. Throws WireError for anything else.
std::size_t read_rice(std::span<const std::byte> bytes, std::uint64_t places,
                      std::span<Index> indices);

}  // namespace topreduce::wire
