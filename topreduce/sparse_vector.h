#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "topreduce/storage.h"

namespace topreduce {

/// A place in one exchange. 32 bits: a bucket (or a model exchanged at once) has fewer than 2^32
/// entries.
using Index = std::uint32_t;

/// The currency between the stages: some entries of a longer vector, indices ascending and unique.
struct SparseVector {
  Buffer<Index> indices;
  Buffer<float> values;

  std::size_t size() const { return indices.size(); }
  bool empty() const { return indices.empty(); }
  void clear() { resize(0); }
  void resize(std::size_t count) {
    // Counts of a handful vary by more than `make_room` foresees.
    constexpr std::size_t kFew = 32;
    if (count > indices.capacity() || count > values.capacity()) {
      make_room(indices, count + kFew);
      make_room(values, count + kFew);
    }
    indices.resize(count);
    values.resize(count);
  }
  /// A copy that grows as `resize` does.
  void assign(const SparseVector& other) {
    resize(other.size());
    *this = other;
  }
  void reserve(std::size_t count) {
    indices.reserve(count);
    values.reserve(count);
  }
  void push_back(Index index, float value) {
    indices.push_back(index);
    values.push_back(value);
  }
};

/// Where the entries from `first` on end that lie before `end`.
inline std::size_t end_of_range(std::span<const Index> indices, std::size_t first,
                                std::uint64_t end) {
  const auto from = indices.begin() + static_cast<std::ptrdiff_t>(first);
  return static_cast<std::size_t>(std::lower_bound(from, indices.end(), end) - indices.begin());
}

/// Calls body(piece number, first, last) with the range of entries before the end of each of
/// `pieces`, which ascend, and not before the end of the last one.
template <class Pieces, class Body>
void for_each_range(std::span<const Index> indices, const Pieces& pieces, Body&& body) {
  std::size_t first = 0;
  for (std::size_t p = 0; p < std::size(pieces); ++p) {
    const std::size_t last = end_of_range(indices, first, pieces[p].end);
    body(p, first, last);
    first = last;
  }
}

/// Adds sparse vectors of one universe. Each entry is summed in the order of `parts` (rank order),
/// so every rank that adds the same parts gets the same bits.
class Adder {
 public:
  /// Replaces `sum` with the sum of `parts`; entries that cancel stay, with value 0.
  void add(std::span<const SparseVector> parts, Index universe, SparseVector& sum);

 private:
  Buffer<float> block_;           // one cache-sized stretch of the universe, dense
  Buffer<std::uint8_t> touched_;  // which of its entries some part holds
  Buffer<std::size_t> next_;      // per part: first entry not yet added
  SparseVector end_;              // of the sum, before it goes there
};

}  // namespace topreduce
