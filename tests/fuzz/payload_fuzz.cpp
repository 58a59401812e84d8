// Any bytes give entries or values, or a WireError, whatever the receiver expects. The first bytes
// of the input choose what that is; the rest is a message, or more often a payload that gets a
// right seal.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "tests/fuzz/input.h"
#include "tests/wire_bytes.h"
#include "topreduce/wire/little_endian.h"
#include "topreduce/wire/payload.h"

namespace topreduce::wire {
namespace {

constexpr Identity kIdentity{.origin = 1, .contents = 2};
constexpr std::uint32_t kRound = 3;

/// Up to eight pieces, with gaps between some of them.
std::vector<Piece> pieces_of(Input& input, Index universe) {
  std::vector<Piece> pieces;
  Index at = 0;
  for (unsigned left = input.byte() % 9; left > 0 && at < universe; --left) {
    const unsigned gap = input.byte() % 8, size = input.byte();
    const Index begin = std::min<Index>(universe, at + gap);
    at = left == 1 ? universe : std::min<Index>(universe, begin + size);
    pieces.push_back({begin, at});
  }
  return pieces;
}

void check_entries(ValueFormat format, Pieces pieces, const SparseVector& entries) {
  require(entries.indices.size() == entries.values.size());
  require(std::ranges::adjacent_find(entries.indices, std::greater_equal<>{}) ==
          entries.indices.end());
  for (const Index index : entries.indices) {
    require(std::ranges::any_of(
        pieces, [index](const Piece& piece) { return piece.begin <= index && index < piece.end; }));
  }
  if (values_per_scale(format) > 1) {
    require(std::ranges::all_of(entries.values, [](float x) { return std::isfinite(x); }));
  }
}

/// What was read can be sent on, and arrives as it was.
void check_journey(Pieces pieces, const SparseVector& entries) {
  SparseVector sent = entries, received;
  Bytes payload;
  encode_entries(ValueFormat::fp32, pieces, sent, payload, sent);
  const Bytes message = sealed(kIdentity, kRound, payload);
  decode_entries(ValueFormat::fp32, pieces, open(kIdentity, kRound, message), received);
  require(received.indices == sent.indices);
  require(equal_bits(received.values, sent.values));
}

/// Calls read(payload) with what the message holds, if anything.
template <class Read>
void receive(const Bytes& message, Read&& read) {
  // A copy without spare room, so that the sanitizer sees a reader that runs over the end.
  const std::vector<std::byte> exact(message.begin(), message.end());
  try {
    read(open(kIdentity, kRound, exact));
  } catch (const WireError&) {
  }
}

void fuzz(Input input) {
  const unsigned choice = input.byte();
  const auto format = static_cast<ValueFormat>(choice % kValueFormatNames.size());
  Index universe = input.word();
  if (choice >= 224) universe = 0xffffffff - universe;
  const auto pieces = pieces_of(input, universe);
  const std::size_t lengths[] = {input.byte(), input.byte()};
  const bool seals = input.byte() % 4 != 0;
  const std::uint32_t count = input.word();

  // A small count before what are to be entries, which random bytes would seldom have.
  Bytes values, entries(sizeof(count));
  store(entries.data(), count);
  append(entries, input.rest());
  append(values, input.rest());
  receive(seals ? sealed(kIdentity, kRound, entries) : values, [&](auto payload) {
    SparseVector read;
    decode_entries(format, pieces, payload, read);
    check_entries(format, pieces, read);
    check_journey(pieces, read);
  });
  receive(seals ? sealed(kIdentity, kRound, values) : values, [&](auto payload) {
    std::vector<float> read(lengths[0] + lengths[1]);
    decode_values(format, lengths, payload, read);
  });
}

}  // namespace
}  // namespace topreduce::wire

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  topreduce::wire::fuzz(topreduce::Input(std::as_bytes(std::span(data, size))));
  return 0;
}
