#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace topreduce::wire {

/// XXH64 as its specification defines it.
std::uint64_t xxh64(std::span<const std::byte> bytes, std::uint64_t seed);

/// What a header carries: the low half of XXH64. Damage slips through once in 2^32.
inline std::uint32_t checksum(std::span<const std::byte> header,
                              std::span<const std::byte> payload) {
  return static_cast<std::uint32_t>(xxh64(payload, xxh64(header, 0)));
}

}  // namespace topreduce::wire
