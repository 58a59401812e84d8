// The payload of entries:
//
//   the number of values       32 bits
//   two bits for every piece   0: entries with indices; 1: every place has its entry; 2: zeros
//   stand
//                              where there are none, because that is smaller
//   the indices                of all pieces that have them, as if those lay side by side: the
//                              front of rice.h
//   the values                 a run for each piece (formats/format.h)
//   the back of rice.h
//
// Values at known places are the runs alone.

#include "topreduce/wire/payload.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>

#include "topreduce/wire/formats/format.h"
#include "topreduce/wire/gap_block.h"
#include "topreduce/wire/little_endian.h"
#include "topreduce/wire/rice.h"

namespace topreduce::wire {
namespace {

constexpr std::size_t kCountBytes = sizeof(std::uint32_t);

enum class Extent : unsigned { listed = 0, full = 1, zero_filled = 2 };

// An index costs a bit for every place and a 32nd for every entry at most: the bitmap that Rice
// codes become. Where zeros at all other places take less, they are written instead. Decided by
// piece, so that rounding does not depend on its neighbours.
Extent extent_of(const Format& format, std::size_t count, std::size_t size) {
  if (count == size) return size > 0 ? Extent::full : Extent::listed;
  if (!format.has_zero) return Extent::listed;
  const std::size_t listed = 8 * format.run_bytes(count) + size + count / 32;
  return 8 * format.run_bytes(size) <= listed ? Extent::zero_filled : Extent::listed;
}

std::size_t extent_bytes(Pieces pieces) {
  return (2 * pieces.size() + 7) / 8;
}

void write_extent(std::byte* extents, std::size_t piece, Extent extent) {
  extents[piece / 4] |= static_cast<std::byte>(static_cast<unsigned>(extent) << 2 * (piece % 4));
}

Extent read_extent(const std::byte* extents, std::size_t piece) {
  return static_cast<Extent>(static_cast<unsigned>(extents[piece / 4]) >> 2 * (piece % 4) & 3);
}

// Moves entries down to `out`, without their zeros; returns the new end.
std::size_t compact_nonzero(SparseVector& entries, std::size_t first, std::size_t last,
                            std::size_t out) {
  for (std::size_t i = first; i < last; ++i) {
    entries.indices[out] = entries.indices[i];
    entries.values[out] = entries.values[i];
    out += entries.values[i] != 0 ? 1 : 0;
  }
  return out;
}

void refuse(const std::string& what) {
  throw std::invalid_argument("encode_entries: " + what);
}

[[noreturn]] void refuse_length(std::size_t came, const std::string& expected) {
  throw WireError("message: payload length is " + std::to_string(came) + ", expected " + expected);
}

// ---- writing -----------------------------------------------------------------------------------

/// Indices become gaps, block by block.
class GapStream {
 public:
  GapStream(std::byte* front, std::byte* back) : writer_(front, back) {}

  /// Ascending indices; those plus `shift` are places among the pieces that have indices.
  void put(std::span<const Index> indices, std::size_t shift) {
    while (!indices.empty()) {
      const std::size_t count = std::min(kBlockGaps - filled_, indices.size());
      Index* const gaps = block_.data() + filled_;
      gaps[0] = static_cast<Index>(indices[0] + shift - following_);
      for (std::size_t i = 1; i < count; ++i) gaps[i] = indices[i] - indices[i - 1] - 1;
      following_ = indices[count - 1] + shift + 1;
      filled_ += count;
      if (filled_ == kBlockGaps) flush();
      indices = indices.subspan(count);
    }
  }

  RiceWriter& finish() {
    if (filled_ > 0) flush();
    return writer_;
  }

 private:
  void flush() {
    writer_.put(std::span(block_).first(filled_), following_ - start_ - filled_);
    start_ = following_;
    filled_ = 0;
  }

  RiceWriter writer_;
  std::array<Index, kBlockGaps> block_;
  std::size_t filled_ = 0;
  std::size_t start_ = 0, following_ = 0;  // the places behind the last block and the last index
};

void check(Pieces pieces, const SparseVector& entries) {
  const Buffer<Index>& indices = entries.indices;
  if (indices.size() != entries.values.size()) {
    refuse(std::to_string(indices.size()) + " indices for " +
           std::to_string(entries.values.size()) + " values");
  }
  assert(std::ranges::adjacent_find(indices, std::greater_equal<>{}) == indices.end());
  std::size_t within = 0;
  for_each_range(indices, pieces, [&](std::size_t p, std::size_t first, std::size_t last) {
    if (first == last || indices[first] >= pieces[p].begin) within += last - first;
  });
  if (within != indices.size()) refuse("an entry lies outside of the pieces");
}

// A piece with zeros at all places that are not among `entries`, some blocks at a time. Receivers
// cannot tell a zero from a place where nothing was: entries that become one are left out. Returns
// the new end of `rounded`, which has `kept` entries so far.
std::size_t encode_zero_filled(const Format& format, const Piece& piece,
                               std::span<const Index> indices, const float* values,
                               std::byte*& codes, SparseVector& rounded, std::size_t kept,
                               bool& finite) {
  constexpr std::size_t kPlaces = 512;
  static_assert(kPlaces % 64 == 0);
  std::size_t next = 0;
  for (std::size_t start = piece.begin; start < piece.end; start += kPlaces) {
    std::array<float, kPlaces> dense{};
    const std::size_t size = std::min(kPlaces, piece.end - start), first = next;
    for (; next < indices.size() && indices[next] < start + size; ++next) {
      dense[indices[next] - start] = values[next];
    }
    finite &= format.encode(std::span(dense).first(size), codes, dense.data());
    codes += format.run_bytes(size);
    for (std::size_t i = first; i < next; ++i) {
      const Index index = indices[i];
      rounded.indices[kept] = index;
      rounded.values[kept] = dense[index - start];
      kept += rounded.values[kept] != 0 ? 1 : 0;
    }
  }
  return kept;
}

}  // namespace

bool encode_entries(ValueFormat values, Pieces pieces, const SparseVector& entries, Bytes& out,
                    SparseVector& rounded) {
  const Format& format = format_of(values);
  check(pieces, entries);
  const std::size_t start = out.size();
  out.resize(start + largest_payload(entries.size(), pieces.size()));
  std::byte* const extents = out.data() + start + kCountBytes;
  std::byte* const back = out.data() + out.size();
  std::fill_n(extents, extent_bytes(pieces), std::byte{0});

  std::size_t count = 0;  // of values
  GapStream gaps(extents + extent_bytes(pieces), back);
  std::size_t before = 0;  // places in pieces with indices
  const auto indices = std::span<const Index>(entries.indices);
  for_each_range(indices, pieces, [&](std::size_t p, std::size_t first, std::size_t last) {
    const auto [begin, end] = pieces[p];
    const Extent extent = extent_of(format, last - first, end - begin);
    write_extent(extents, p, extent);
    count += extent == Extent::listed ? last - first : end - begin;
    if (extent != Extent::listed) return;
    gaps.put(indices.subspan(first, last - first), before - begin);
    before += end - begin;
  });
  RiceWriter& rice = gaps.finish();
  store(out.data() + start, static_cast<std::uint32_t>(count));

  bool finite = true;
  std::byte* codes = rice.finish();
  if (&rounded != &entries) rounded.resize(entries.size());
  std::size_t kept = 0;
  for_each_range(indices, pieces, [&](std::size_t p, std::size_t first, std::size_t last) {
    const auto range = indices.subspan(first, last - first);
    const float* const from = entries.values.data() + first;
    if (read_extent(extents, p) == Extent::zero_filled) {
      kept = encode_zero_filled(format, pieces[p], range, from, codes, rounded, kept, finite);
      return;
    }
    finite &= format.encode({from, range.size()}, codes, rounded.values.data() + kept);
    codes += format.run_bytes(range.size());
    if (rounded.indices.data() + kept != range.data()) {
      std::copy_n(range.data(), range.size(), rounded.indices.data() + kept);
    }
    kept += range.size();
  });
  rounded.resize(kept);
  codes = std::copy(rice.back(), back, codes);
  out.resize(static_cast<std::size_t>(codes - out.data()));
  return finite;
}

bool encode_values(ValueFormat values_format, std::span<const std::size_t> lengths,
                   std::span<const float> values, Bytes& out, std::span<float> rounded) {
  const Format& format = format_of(values_format);
  const std::size_t start = out.size();
  std::size_t bytes = 0, place = 0;
  for (const std::size_t length : lengths) bytes += format.run_bytes(length);
  out.resize(start + bytes);
  std::byte* codes = out.data() + start;
  bool finite = true;
  for (const std::size_t length : lengths) {
    finite &= format.encode(values.subspan(place, length), codes, rounded.data() + place);
    codes += format.run_bytes(length);
    place += length;
  }
  assert(place == values.size());
  return finite;
}

// ---- reading -----------------------------------------------------------------------------------

void decode_entries(ValueFormat values, Pieces pieces, std::span<const std::byte> payload,
                    SparseVector& entries) {
  const Format& format = format_of(values);
  const std::size_t before_indices = kCountBytes + extent_bytes(pieces);
  if (payload.size() < before_indices) {
    refuse_length(payload.size(), "at least " + std::to_string(before_indices));
  }
  const std::size_t count = load<std::uint32_t>(payload.data());
  // No run of values is shorter than its codes side by side.
  const std::size_t least =
      before_indices +
      static_cast<std::size_t>(bits_per_value(values) * static_cast<double>(count) / 8);
  if (payload.size() < least) {
    refuse_length(payload.size(), "at least " + std::to_string(least) + " for " +
                                      std::to_string(count) + " entries");
  }
  const std::byte* const extents = payload.data() + kCountBytes;
  std::size_t places = 0, whole = 0;  // with indices, without
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    const Extent extent = read_extent(extents, p);
    if (extent > Extent::zero_filled) throw WireError("message: extent is 3, expected at most 2");
    (extent == Extent::listed ? places : whole) += pieces[p].end - pieces[p].begin;
  }
  if (count < whole || count - whole > places) {
    throw WireError("message: count is " + std::to_string(count) + ", expected " +
                    std::to_string(whole) + " to " + std::to_string(whole + places));
  }
  entries.resize(count);
  // The indices that travelled are read to the end of their room; from there each finds its place
  // at or before its own.
  const auto travelled = std::span(entries.indices).subspan(whole);
  const auto coded = payload.subspan(before_indices);
  const RiceBytes rice = read_rice(coded, places, travelled);

  auto rest = coded.subspan(rice.front, coded.size() - rice.front - rice.back);
  const auto read_run = [&](std::size_t first, std::size_t size) {
    const std::size_t bytes = format.run_bytes(size);
    if (rest.size() < bytes) refuse_length(payload.size(), "more for the values");
    format.decode(rest.data(), std::span(entries.values).subspan(first, size));
    rest = rest.subspan(bytes);
  };
  std::size_t out = 0, before = 0;
  Index* next = travelled.data();
  Index* const end_of_travelled = next + travelled.size();
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    const auto [begin, end] = pieces[p];
    const std::size_t first = out;
    const Extent extent = read_extent(extents, p);
    if (extent != Extent::listed) {
      out += end - begin;
      read_run(first, end - begin);
      std::iota(entries.indices.begin() + static_cast<std::ptrdiff_t>(first),
                entries.indices.begin() + static_cast<std::ptrdiff_t>(out), begin);
      if (extent == Extent::zero_filled) out = compact_nonzero(entries, first, out, first);
      continue;
    }
    const auto shift = static_cast<Index>(begin - before);  // may wrap round, and back
    before += end - begin;
    Index* const last = std::lower_bound(next, end_of_travelled, before);
    Index* const to = entries.indices.data() + first;
    const auto size = static_cast<std::size_t>(last - next);
    if (shift != 0 || to != next) {
      for (std::size_t i = 0; i < size; ++i) to[i] = next[i] + shift;
    }
    next = last;
    out += size;
    read_run(first, size);
  }
  if (!rest.empty()) {
    refuse_length(payload.size(), std::to_string(payload.size() - rest.size()));
  }
  entries.resize(out);
}

void decode_values(ValueFormat values_format, std::span<const std::size_t> lengths,
                   std::span<const std::byte> payload, std::span<float> values) {
  const Format& format = format_of(values_format);
  std::size_t bytes = 0, place = 0;
  for (const std::size_t length : lengths) bytes += format.run_bytes(length);
  if (payload.size() != bytes) refuse_length(payload.size(), std::to_string(bytes));
  const std::byte* codes = payload.data();
  for (const std::size_t length : lengths) {
    format.decode(codes, values.subspan(place, length));
    codes += format.run_bytes(length);
    place += length;
  }
}

// ---- sizes -------------------------------------------------------------------------------------

std::size_t largest_payload(std::size_t count, std::size_t pieces) {
  // A piece is filled up with zeros only if that takes about a bit for every place, and then its
  // places are at most twice its entries.
  return kCountBytes + 4 * pieces + most_rice_bytes(count) + 5 * count;
}

double bits_per_index(double density) {
  return density >= 1 ? 1 : 1.5 - std::log2(density);
}

}  // namespace topreduce::wire
