#include "topreduce/wire/message.h"

#include <algorithm>
#include <cassert>
#include <functional>
#include <stdexcept>
#include <string>

#include "topreduce/wire/gaps.h"
#include "topreduce/wire/header.h"
#include "topreduce/wire/values.h"

namespace topreduce::wire {
namespace {

[[noreturn]] void refuse_length(std::size_t came, const std::string& expected) {
  throw WireError("message: payload length is " + std::to_string(came) + ", expected " + expected);
}

void require_room(const char* call, std::size_t needed, const Envelope& envelope) {
  if (needed <= envelope.universe) return;
  throw std::invalid_argument(std::string(call) + ": " + std::to_string(needed) +
                              " places do not fit into a universe of " +
                              std::to_string(envelope.universe));
}

}  // namespace

void pack(const Envelope& envelope, Vote vote, SparseVector& entries, Bytes& out) {
  const auto& [indices, values] = entries;
  if (indices.size() != values.size()) {
    throw std::invalid_argument("pack: " + std::to_string(indices.size()) + " indices for " +
                                std::to_string(values.size()) + " values");
  }
  assert(std::ranges::adjacent_find(indices, std::greater_equal<>{}) == indices.end());
  if (!indices.empty()) require_room("pack", std::size_t{indices.back()} + 1, envelope);

  const std::size_t start = out.size();
  out.resize(start + largest_message(entries.size(), envelope.values));
  std::byte* const message = out.data() + start;
  std::byte* const codes = encode_gaps(entries.indices, message + kHeaderBytes);
  encode_values(envelope.values, entries.values, codes);
  const auto gap_bytes = static_cast<std::size_t>(codes - message) - kHeaderBytes;
  out.resize(start + kHeaderBytes + gap_bytes + entries.size() * width(envelope.values));
  seal(envelope, Kind::entries, vote, entries.size(), std::span(out).subspan(start));
}

void pack_stretch(const Envelope& envelope, Vote vote, std::span<float> values, Bytes& out) {
  require_room("pack_stretch", values.size(), envelope);
  const std::size_t start = out.size();
  out.resize(start + kHeaderBytes + values.size() * width(envelope.values));
  encode_values(envelope.values, values, out.data() + start + kHeaderBytes);
  seal(envelope, Kind::stretch, vote, values.size(), std::span(out).subspan(start));
}

Vote unpack(const Envelope& expected, std::span<const std::byte> message, SparseVector& entries) {
  const auto [vote, count, payload] = open(expected, Kind::entries, message);
  const std::size_t value_bytes = count * width(expected.values);
  if (payload.size() < count + value_bytes) {
    refuse_length(payload.size(), "at least " + std::to_string(count + value_bytes) + " for " +
                                      std::to_string(count) + " entries");
  }
  const auto gaps = payload.first(payload.size() - value_bytes);
  entries.resize(count);
  decode_gaps(gaps, expected.universe, entries.indices);
  decode_values(expected.values, payload.data() + gaps.size(), entries.values);
  return vote;
}

Vote unpack_stretch(const Envelope& expected, std::span<const std::byte> message,
                    std::span<float> values) {
  const auto [vote, count, payload] = open(expected, Kind::stretch, message);
  if (count != values.size()) {
    throw WireError("message: count is " + std::to_string(count) + ", expected " +
                    std::to_string(values.size()));
  }
  const std::size_t value_bytes = count * width(expected.values);
  if (payload.size() != value_bytes) refuse_length(payload.size(), std::to_string(value_bytes));
  decode_values(expected.values, payload.data(), values);
  return vote;
}

bool is_stretch(std::span<const std::byte> message) {
  return message.size() >= kHeaderBytes && kind_of(message) == Kind::stretch;
}

std::size_t stretch_message(std::size_t count, Values values) {
  return kHeaderBytes + count * width(values);
}

std::size_t largest_message(std::size_t count, Values values) {
  return kHeaderBytes + count * (kLargestGapBytes + width(values));
}

}  // namespace topreduce::wire
