// Any bytes give a message or a WireError, whatever the receiver expects. The first bytes of the
// input choose what that is; the rest is the message, or a payload that gets a right header.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <vector>

#include "topreduce/wire/header.h"
#include "topreduce/wire/message.h"

namespace topreduce::wire {
namespace {

/// Takes numbers off the front of the input; zeros behind its end.
class Input {
 public:
  explicit Input(std::span<const std::byte> bytes) : bytes_(bytes) {}

  unsigned byte() {
    if (bytes_.empty()) return 0;
    const auto value = static_cast<unsigned>(bytes_.front());
    bytes_ = bytes_.subspan(1);
    return value;
  }
  unsigned word() {
    const unsigned low = byte();
    return low | byte() << 8;
  }
  std::span<const std::byte> rest() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

void require(bool holds) {
  if (!holds) std::abort();
}

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

void check_entries(const Envelope& envelope, Pieces pieces, const SparseVector& entries) {
  require(entries.indices.size() == entries.values.size());
  require(std::ranges::adjacent_find(entries.indices, std::greater_equal<>{}) ==
          entries.indices.end());
  for (const Index index : entries.indices) {
    require(std::ranges::any_of(
        pieces, [index](const Piece& piece) { return piece.begin <= index && index < piece.end; }));
  }
  if (values_per_scale(envelope.values) > 1) {
    require(std::ranges::all_of(entries.values, [](float x) { return std::isfinite(x); }));
  }
}

/// What was read can be sent on, and arrives as it was.
void check_journey(Envelope envelope, Pieces pieces, const SparseVector& entries) {
  envelope.values = Values::fp32;
  SparseVector sent = entries, received;
  Bytes message;
  pack(envelope, pieces, Vote::yes, sent, message);
  unpack(envelope, pieces, message, received);
  require(received.indices == sent.indices);
  require(std::ranges::equal(std::as_bytes(std::span(received.values)),
                             std::as_bytes(std::span(sent.values))));
}

void read_everything(const Envelope& envelope, Pieces pieces, std::span<const std::size_t> lengths,
                     std::span<const std::byte> message) {
  SparseVector entries;
  try {
    unpack(envelope, pieces, message, entries);
    check_entries(envelope, pieces, entries);
    check_journey(envelope, pieces, entries);
  } catch (const WireError&) {
  }
  std::size_t count = 0;
  for (const std::size_t length : lengths) count += length;
  std::vector<float> values(count);
  try {
    unpack_stretch(envelope, lengths, message, values);
  } catch (const WireError&) {
  }
  try {
    require(first_message(message).size() <= message.size());
  } catch (const WireError&) {
  }
}

}  // namespace
}  // namespace topreduce::wire

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace topreduce;
  using namespace topreduce::wire;
  Input input(std::as_bytes(std::span(data, size)));
  const unsigned choice = input.byte();
  Envelope envelope{.run = 1, .step = 2, .bucket = 3, .universe = input.word()};
  envelope.values = static_cast<Values>(choice % kValuesNames.size());
  if (choice >= 224) envelope.universe = 0xffffffff - envelope.universe;
  const auto pieces = pieces_of(input, envelope.universe);
  const std::size_t lengths[] = {input.byte(), input.byte()};
  const bool sealed = input.byte() % 4 != 0;
  const unsigned kind = input.byte(), count = input.word();
  Bytes message;
  if (sealed) message.resize(kHeaderBytes);
  message.insert(message.end(), input.rest().begin(), input.rest().end());
  if (sealed) {
    const bool chunk = kind % 2 == 1;
    seal(envelope, chunk ? Kind::stretch : Kind::entries, static_cast<Vote>(kind / 2 % 2),
         chunk ? lengths[0] + lengths[1] : count, message);
  }
  // A copy without spare room, so that the sanitizer sees a reader that runs over the end.
  const std::vector<std::byte> exact(message.begin(), message.end());
  read_everything(envelope, pieces, lengths, exact);
  return 0;
}
