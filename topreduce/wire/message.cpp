#include "topreduce/wire/message.h"

#include <stdexcept>
#include <string>

#include "topreduce/wire/header.h"

namespace topreduce::wire {
namespace {

// `vote`, unless a value could not be said.
Vote both(Vote vote, bool finite) {
  return finite ? vote : Vote::no;
}

}  // namespace

// ---- writing -----------------------------------------------------------------------------------

Vote pack(const Envelope& envelope, Pieces pieces, Vote vote, SparseVector& entries, Bytes& out) {
  if (!pieces.empty() && pieces.back().end > envelope.universe) {
    throw std::invalid_argument("pack: a piece ends at " + std::to_string(pieces.back().end) +
                                " in a universe of " + std::to_string(envelope.universe));
  }
  const std::size_t start = out.size();
  out.resize(start + kHeaderBytes);
  try {
    const auto [count, finite] = encode_entries(envelope.values, pieces, entries, out, entries);
    vote = both(vote, finite);
    seal(envelope, Kind::entries, vote, count, std::span(out).subspan(start));
  } catch (...) {
    out.resize(start);
    throw;
  }
  return vote;
}

Vote pack_stretch(const Envelope& envelope, std::span<const std::size_t> lengths, Vote vote,
                  std::span<float> values, Bytes& out) {
  if (values.size() > envelope.universe) {
    throw std::invalid_argument("pack_stretch: " + std::to_string(values.size()) +
                                " places do not fit into a universe of " +
                                std::to_string(envelope.universe));
  }
  const std::size_t start = out.size();
  out.resize(start + kHeaderBytes);
  vote = both(vote, encode_values(envelope.values, lengths, values, out, values));
  seal(envelope, Kind::stretch, vote, values.size(), std::span(out).subspan(start));
  return vote;
}

// ---- reading -----------------------------------------------------------------------------------

Vote unpack(const Envelope& expected, Pieces pieces, std::span<const std::byte> message,
            SparseVector& entries) {
  const auto [vote, count, payload] = open(expected, Kind::entries, message);
  decode_entries(expected.values, pieces, count, payload, entries);
  return vote;
}

Vote unpack_stretch(const Envelope& expected, std::span<const std::size_t> lengths,
                    std::span<const std::byte> message, std::span<float> values) {
  const auto [vote, count, payload] = open(expected, Kind::stretch, message);
  if (count != values.size()) {
    throw WireError("message: count is " + std::to_string(count) + ", expected " +
                    std::to_string(values.size()));
  }
  decode_values(expected.values, lengths, payload, values);
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
    throw WireError("message: payload length is " + std::to_string(messages.size() - kHeaderBytes) +
                    ", expected " + std::to_string(payload));
  }
  return messages.first(kHeaderBytes + static_cast<std::size_t>(payload));
}

std::size_t largest_message(std::size_t count, std::size_t pieces) {
  return kHeaderBytes + largest_payload(count, pieces);
}

}  // namespace topreduce::wire
