#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

// Every message starts with its seal:
//
//   at 0   contents, 16 bits: which parameters it is about, and what the ranks chose together
//   at 2   checksum, 32 bits: of contents and payload, and of all else that both sides must know
//   at 6   the payload
//
// Version, run and step are compared before, once for a step (comm/mailbox.h, agreement.h); so a
// checksum that is not right means damage, and other contents mean a disagreement.

namespace topreduce::wire {

/// What sender and receiver of a message must have in common.
struct Identity {
  std::uint64_t origin = 0;    ///< run, step, exchange, kind and format of values
  std::uint64_t contents = 0;  ///< parameters, and what the ranks chose together
  /// What it means if a message has other contents.
  const char* disagreement =
      "the ranks hand over different parameters; all must add the same ones in every step";
};

inline constexpr std::size_t kSealBytes = 6;
using Seal = std::array<std::byte, kSealBytes>;

Seal seal(const Identity& identity, std::uint32_t round, std::span<const std::byte> payload);

/// The payload of `message`; throws WireError if it is not the one expected, whole and undamaged.
std::span<const std::byte> open(const Identity& expected, std::uint32_t round,
                                std::span<const std::byte> message);

}  // namespace topreduce::wire
