#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace topreduce::wire {

/// XXH32 of the xxHash specification. With one seed, bytes that differ within one aligned 32-bit
/// word never have the same checksum; all else slips through once in 2^32.
std::uint32_t checksum(std::span<const std::byte> bytes, std::uint32_t seed);

}  // namespace topreduce::wire
