// The payload of a message of entries:
//
//   two bits for every piece   0: entries with indices; 1: every place has its entry; 2: zeros
//   stand
//                              where there are none, because that is smaller
//   the indices                of all pieces that have them, as if those lay side by side (rice.h)
//   the values                 a run for each piece (values.h)
//
// A stretch is the runs alone.

#include "topreduce/wire/message.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>

#include "topreduce/wire/blocks.h"
#include "topreduce/wire/header.h"
#include "topreduce/wire/rice.h"
#include "topreduce/wire/values.h"

namespace topreduce::wire {
namespace {

enum class Extent : unsigned { listed = 0, full = 1, filled = 2 };

// An index costs a bit for every place and a 32nd for every entry at most: the bitmap that Rice
// codes become. Where zeros at all other places take less, they are written instead. Decided by
// piece, so that rounding does not depend on its neighbours. `sign` has no zero.
Extent extent_of(Values values, std::size_t count, std::size_t size) {
  if (count == size) return size > 0 ? Extent::full : Extent::listed;
  if (values == Values::sign) return Extent::listed;
  const std::size_t listed = 8 * run_bytes(values, count) + size + count / 32;
  return 8 * run_bytes(values, size) <= listed ? Extent::filled : Extent::listed;
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

// `vote`, unless a value could not be said.
Vote both(Vote vote, Vote said) {
  return said == Vote::no ? Vote::no : vote;
}

// Calls body(piece number, first, last) with the range of `entries` in each piece.
template <class Body>
void for_each_range(const SparseVector& entries, Pieces pieces, Body&& body) {
  auto first = entries.indices.begin();
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    const auto last = std::lower_bound(first, entries.indices.end(), pieces[p].end);
    body(p, static_cast<std::size_t>(first - entries.indices.begin()),
         static_cast<std::size_t>(last - entries.indices.begin()));
    first = last;
  }
}

// A run, by several threads.
Vote encode(Values values, std::span<float> run, Threads& threads, std::byte*& out) {
  const Stretches stretches(run.size(), 1, kBlockValues);
  std::array<Vote, Stretches::kMost> votes;
  threads.for_each(stretches.count(), [&](std::size_t s) {
    const std::size_t begin = stretches.begin(s);
    std::byte* codes = out + run_bytes(values, begin);
    votes[s] = encode_run(values, run.subspan(begin, stretches.length(s)), codes);
  });
  out += run_bytes(values, run.size());
  const auto said = std::span(votes).first(stretches.count());
  return std::ranges::find(said, Vote::no) == said.end() ? Vote::yes : Vote::no;
}

// The last place in `out` where `count` indices fit.
Index* last_indices(Bytes& out, std::size_t count) {
  const auto end = reinterpret_cast<std::uintptr_t>(out.data() + out.size());
  const std::uintptr_t start = (end - count * sizeof(Index)) / alignof(Index) * alignof(Index);
  return reinterpret_cast<Index*>(start);
}

// A piece with zeros at all places that are not among `entries`. Blocks of 64 places are filled and
// written one by one.
Vote encode_filled(Values values, const Piece& piece, std::span<const Index> indices,
                   std::span<float> entries, std::byte*& out) {
  Vote vote = Vote::yes;
  std::size_t next = 0;
  for (std::size_t start = piece.begin; start < piece.end; start += kBlockValues) {
    std::array<float, kBlockValues> block{};
    const std::size_t size = std::min(kBlockValues, piece.end - start), first = next;
    for (; next < indices.size() && indices[next] < start + size; ++next) {
      block[indices[next] - start] = entries[next];
    }
    vote = both(vote, encode_run(values, std::span(block).first(size), out));
    for (std::size_t i = first; i < next; ++i) entries[i] = block[indices[i] - start];
  }
  return vote;
}

// Moves entries [first, last) down to `out`, without their zeros; returns the new end.
std::size_t move_down_nonzero(SparseVector& entries, std::size_t first, std::size_t last,
                              std::size_t out) {
  for (std::size_t i = first; i < last; ++i) {
    entries.indices[out] = entries.indices[i];
    entries.values[out] = entries.values[i];
    out += entries.values[i] != 0 ? 1 : 0;
  }
  return out;
}

std::size_t move_down(SparseVector& entries, std::size_t first, std::size_t last, std::size_t out) {
  if (out != first) {
    std::copy_n(entries.indices.data() + first, last - first, entries.indices.data() + out);
    std::copy_n(entries.values.data() + first, last - first, entries.values.data() + out);
  }
  return out + last - first;
}

void refuse(const char* call, const std::string& what) {
  throw std::invalid_argument(std::string(call) + ": " + what);
}

[[noreturn]] void refuse_length(std::size_t came, const std::string& expected) {
  throw WireError("message: payload length is " + std::to_string(came) + ", expected " + expected);
}

void check(const Envelope& envelope, Pieces pieces, const SparseVector& entries) {
  run_bytes(envelope.values, 0);  // does the encoding exist?
  const auto& [indices, values] = entries;
  if (indices.size() != values.size()) {
    refuse("pack", std::to_string(indices.size()) + " indices for " +
                       std::to_string(values.size()) + " values");
  }
  assert(std::ranges::adjacent_find(indices, std::greater_equal<>{}) == indices.end());
  if (!pieces.empty() && pieces.back().end > envelope.universe) {
    refuse("pack", "a piece ends at " + std::to_string(pieces.back().end) + " in a universe of " +
                       std::to_string(envelope.universe));
  }
}

}  // namespace

// ---- writing -----------------------------------------------------------------------------------

Vote pack(const Envelope& envelope, Pieces pieces, Vote vote, SparseVector& entries, Bytes& out,
          Threads& given) {
  // Entries are few beside those that were looked at: what does not last long stays on one thread.
  Threads& threads = entries.size() < 8 * Stretches::grain ? Threads::none() : given;
  check(envelope, pieces, entries);
  const std::size_t start = out.size();
  out.resize(start + largest_message(entries.size(), pieces.size()));
  std::byte* const extents = out.data() + start + kHeaderBytes;
  std::fill_n(extents, extent_bytes(pieces), std::byte{0});

  // Gaps wait where the values will come to lie.
  Index* const gaps = last_indices(out, entries.size());
  std::size_t listed = 0;
  std::size_t before = 0, following = 0, count = 0, seen = 0;  // places in pieces with indices
  for_each_range(entries, pieces, [&](std::size_t p, std::size_t first, std::size_t last) {
    const auto [begin, end] = pieces[p];
    seen += last - first;
    if (first < last && entries.indices[first] < begin) seen = entries.size() + 1;
    const Extent extent = extent_of(envelope.values, last - first, end - begin);
    write_extent(extents, p, extent);
    if (extent != Extent::listed) {
      count += end - begin;
      return;
    }
    for (std::size_t i = first; i < last; ++i) {
      const std::size_t place = entries.indices[i] - begin + before;
      gaps[listed++] = static_cast<Index>(place - following);
      following = place + 1;
    }
    before += end - begin;
    count += last - first;
  });
  if (seen != entries.size()) {
    out.resize(start);
    refuse("pack", "an entry lies outside of the pieces");
  }

  std::byte* codes = write_rice(std::span(gaps, listed), threads, extents + extent_bytes(pieces));
  std::size_t kept = 0;
  for_each_range(entries, pieces, [&](std::size_t p, std::size_t first, std::size_t last) {
    const auto indices = std::span<const Index>(entries.indices).subspan(first, last - first);
    const auto values = std::span(entries.values).subspan(first, last - first);
    const bool filled = read_extent(extents, p) == Extent::filled;
    vote = both(vote, filled ? encode_filled(envelope.values, pieces[p], indices, values, codes)
                             : encode(envelope.values, values, threads, codes));
    // Receivers cannot tell a zero from a place where nothing was.
    kept = filled ? move_down_nonzero(entries, first, last, kept)
                  : move_down(entries, first, last, kept);
  });
  entries.resize(kept);
  out.resize(static_cast<std::size_t>(codes - out.data()));
  seal(envelope, Kind::entries, vote, count, std::span(out).subspan(start));
  return vote;
}

Vote pack_stretch(const Envelope& envelope, std::span<const std::size_t> lengths, Vote vote,
                  std::span<float> values, Bytes& out, Threads& threads) {
  if (values.size() > envelope.universe) {
    refuse("pack_stretch", std::to_string(values.size()) +
                               " places do not fit into a universe of " +
                               std::to_string(envelope.universe));
  }
  const std::size_t start = out.size();
  std::size_t bytes = kHeaderBytes, place = 0;
  for (const std::size_t length : lengths) bytes += run_bytes(envelope.values, length);
  out.resize(start + bytes);
  std::byte* codes = out.data() + start + kHeaderBytes;
  for (const std::size_t length : lengths) {
    vote = both(vote, encode(envelope.values, values.subspan(place, length), threads, codes));
    place += length;
  }
  assert(place == values.size());
  seal(envelope, Kind::stretch, vote, values.size(), std::span(out).subspan(start));
  return vote;
}

// ---- reading -----------------------------------------------------------------------------------

Vote unpack(const Envelope& expected, Pieces pieces, std::span<const std::byte> message,
            SparseVector& entries) {
  const Opened opened = open(expected, Kind::entries, message);
  const std::size_t count = opened.count;
  const auto payload = opened.payload;
  // No run of values is shorter than its codes side by side.
  const auto least =
      extent_bytes(pieces) +
      static_cast<std::size_t>(bits_per_value(expected.values) * static_cast<double>(count) / 8);
  if (payload.size() < least) {
    refuse_length(payload.size(), "at least " + std::to_string(least) + " for " +
                                      std::to_string(count) + " entries");
  }
  const std::byte* const extents = payload.data();
  std::size_t places = 0, whole = 0;  // with indices, without
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    const Extent extent = read_extent(extents, p);
    if (extent > Extent::filled) throw WireError("message: extent is 3, expected at most 2");
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
  const std::size_t index_bytes =
      read_rice(payload.subspan(extent_bytes(pieces)), places, travelled);

  auto rest = payload.subspan(extent_bytes(pieces) + index_bytes);
  const auto read_run = [&](std::size_t first, std::size_t size) {
    const std::size_t bytes = run_bytes(expected.values, size);
    if (rest.size() < bytes) refuse_length(payload.size(), "more for the values");
    decode_run(expected.values, rest.data(), std::span(entries.values).subspan(first, size));
    rest = rest.subspan(bytes);
  };
  std::size_t out = 0, next = 0, before = 0;
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    const auto [begin, end] = pieces[p];
    const std::size_t first = out;
    const Extent extent = read_extent(extents, p);
    if (extent != Extent::listed) {
      out += end - begin;
      read_run(first, end - begin);
      std::iota(entries.indices.begin() + static_cast<std::ptrdiff_t>(first),
                entries.indices.begin() + static_cast<std::ptrdiff_t>(out), begin);
      if (extent == Extent::filled) out = move_down_nonzero(entries, first, out, first);
      continue;
    }
    const std::size_t shift = begin - before;  // may wrap round, and back
    before += end - begin;
    for (; next < travelled.size() && travelled[next] < before; ++next) {
      entries.indices[out++] = static_cast<Index>(travelled[next] + shift);
    }
    read_run(first, out - first);
  }
  if (!rest.empty()) {
    refuse_length(payload.size(), std::to_string(payload.size() - rest.size()));
  }
  entries.resize(out);
  return opened.vote;
}

Vote unpack_stretch(const Envelope& expected, std::span<const std::size_t> lengths,
                    std::span<const std::byte> message, std::span<float> values) {
  const auto [vote, count, payload] = open(expected, Kind::stretch, message);
  if (count != values.size()) {
    throw WireError("message: count is " + std::to_string(count) + ", expected " +
                    std::to_string(values.size()));
  }
  std::size_t bytes = 0, place = 0;
  for (const std::size_t length : lengths) bytes += run_bytes(expected.values, length);
  if (payload.size() != bytes) refuse_length(payload.size(), std::to_string(bytes));
  const std::byte* codes = payload.data();
  for (const std::size_t length : lengths) {
    decode_run(expected.values, codes, values.subspan(place, length));
    codes += run_bytes(expected.values, length);
    place += length;
  }
  return vote;
}

// ---- sizes -------------------------------------------------------------------------------------

std::span<const std::byte> first_message(std::span<const std::byte> messages) {
  if (messages.size() < kHeaderBytes) {
    throw WireError("message: length is " + std::to_string(messages.size()) +
                    ", expected at least " + std::to_string(kHeaderBytes));
  }
  const std::uint64_t payload = payload_bytes(messages);
  if (payload > messages.size() - kHeaderBytes) {
    refuse_length(messages.size() - kHeaderBytes, std::to_string(payload));
  }
  return messages.first(kHeaderBytes + static_cast<std::size_t>(payload));
}

std::size_t largest_message(std::size_t count, std::size_t pieces) {
  // A piece is filled up with zeros only if that takes about a bit for every place, and then its
  // places are at most twice its entries.
  return kHeaderBytes + 4 * pieces + most_rice_bytes(count) + 5 * count;
}

std::size_t values_per_scale(Values encoding) {
  return code_bits(encoding) > 0 ? kBlockValues : 1;
}

Values without_scales(Values encoding) {
  return values_per_scale(encoding) > 1 ? Values::bf16 : encoding;
}

double bits_per_value(Values encoding) {
  return 8.0 * static_cast<double>(run_bytes(encoding, kBlockValues)) / kBlockValues;
}

double bits_per_index(double density) {
  return density >= 1 ? 1 : 1.5 - std::log2(density);
}

}  // namespace topreduce::wire
