#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "topreduce/wire/message.h"

// A message is a header, then its payload. All numbers are little endian, nothing is padded:
//
//   at  0  magic "TPR1"       at  8  run             at 28  count of values
//   at  4  version            at 12  bucket          at 32  payload bytes, 64 bits
//   at  5  kind               at 16  step, 64 bits   at 40  loss scale, a float
//   at  6  values encoding    at 24  contents        at 44  checksum of all else
//   at  7  vote                                      at 48  the payload

namespace topreduce::wire {

inline constexpr std::size_t kHeaderBytes = 48;

enum class Kind : std::uint8_t { entries = 1, stretch = 2 };

/// Writes the header of `message`, whose payload is already in place.
void seal(const Envelope& envelope, Kind kind, Vote vote, std::size_t count,
          std::span<std::byte> message);

/// The length that a message of at least kHeaderBytes gives its payload; not checked.
std::uint64_t payload_bytes(std::span<const std::byte> message);

struct Opened {
  Vote vote;
  std::size_t count;  ///< at most the universe
  std::span<const std::byte> payload;
};

/// Checks that `message` is whole and undamaged, then that it is the one `expected`. Throws
/// WireError that names the field, what was expected and what came.
Opened open(const Envelope& expected, Kind kind, std::span<const std::byte> message);

}  // namespace topreduce::wire
