#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "topreduce/sparse_vector.h"

// Ascending indices as the gaps between them, Rice-coded in blocks of 256: a parameter k for each
// block, then of every gap its quotient gap >> k in unary and its lowest k bits. Quotients and low
// bits stand apart, so that neither waits for the other when they are read:
//
//   front, upwards     for each block k in 5 bits, then for each gap as many zeros as its quotient
//                      says and a one; in the last block, if it is shorter, all low bits follow.
//                      Bits fill bytes from the lowest up; the last byte is filled with zeros.
//   back, downwards    the low bits of each full block (gap_block.h), the first block last
//
// With k = 0 this is a bitmap.

namespace topreduce::wire {

/// Room that `count` gaps need, wherever they lie.
constexpr std::size_t most_rice_bytes(std::size_t count) {
  return 5 * count + 16;
}

class RiceWriter {
 public:
  /// Between `front` and `back` there must be room for most_rice_bytes.
  RiceWriter(std::byte* front, std::byte* back) : front_(front), back_(back) {}

  /// A block of 256 gaps; fewer only in the last. `sum` is that of the gaps.
  void put(std::span<const Index> gaps, std::uint64_t sum);

  /// After the last block: the end of what grows upwards.
  std::byte* finish();
  /// The start of what grows downwards.
  std::byte* back() const { return back_; }

 private:
  void put_bits(std::uint64_t bits, unsigned count);
  void put_quotients(std::span<const Index> gaps, unsigned parameter);

  std::byte *front_, *back_;
  std::uint64_t pending_ = 0;  // bits not yet written ...
  std::uint64_t filled_ = 0;   // ... and how many, fewer than 64 between puts
};

struct RiceBytes {
  std::size_t front, back;
};

/// Reads indices.size() ascending indices below `places` from both ends of `bytes`; returns how
/// many bytes they take there. Throws WireError for anything else.
RiceBytes read_rice(std::span<const std::byte> bytes, std::uint64_t places,
                    std::span<Index> indices);

}  // namespace topreduce::wire
