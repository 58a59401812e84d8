#include "topreduce/wire/checksum.h"

#include <bit>

#include "topreduce/wire/little_endian.h"

namespace topreduce::wire {
namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4F;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9;
constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5;

std::uint64_t mix(std::uint64_t lane, std::uint64_t word) {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

std::uint64_t merge(std::uint64_t hash, std::uint64_t lane) {
  return (hash ^ mix(0, lane)) * kPrime1 + kPrime4;
}

}  // namespace

std::uint64_t xxh64(std::span<const std::byte> bytes, std::uint64_t seed) {
  const std::byte* next = bytes.data();
  std::size_t left = bytes.size();
  std::uint64_t hash = seed + kPrime5;
  if (left >= 32) {
    // Four lanes that do not wait for each other.
    std::uint64_t a = seed + kPrime1 + kPrime2, b = seed + kPrime2, c = seed, d = seed - kPrime1;
    for (; left >= 32; left -= 32, next += 32) {
      a = mix(a, load<std::uint64_t>(next));
      b = mix(b, load<std::uint64_t>(next + 8));
      c = mix(c, load<std::uint64_t>(next + 16));
      d = mix(d, load<std::uint64_t>(next + 24));
    }
    hash = std::rotl(a, 1) + std::rotl(b, 7) + std::rotl(c, 12) + std::rotl(d, 18);
    hash = merge(merge(merge(merge(hash, a), b), c), d);
  }
  hash += bytes.size();
  for (; left >= 8; left -= 8, next += 8) {
    hash = std::rotl(hash ^ mix(0, load<std::uint64_t>(next)), 27) * kPrime1 + kPrime4;
  }
  if (left >= 4) {
    hash = std::rotl(hash ^ (load<std::uint32_t>(next) * kPrime1), 23) * kPrime2 + kPrime3;
    left -= 4;
    next += 4;
  }
  for (; left > 0; --left, ++next) {
    hash = std::rotl(hash ^ (static_cast<std::uint64_t>(*next) * kPrime5), 11) * kPrime1;
  }
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace topreduce::wire
