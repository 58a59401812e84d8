#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace topreduce::wire {

/// XXH64 as its specification defines it.
std::uint64_t xxh64(std::span<const std::byte> bytes, std::uint64_t seed);

}  // namespace topreduce::wire
