#include "topreduce/wire/checksum.h"

#include <bit>

#include "topreduce/wire/little_endian.h"

namespace topreduce::wire {
namespace {

constexpr std::uint32_t kPrime1 = 0x9E3779B1;
constexpr std::uint32_t kPrime2 = 0x85EBCA77;
constexpr std::uint32_t kPrime3 = 0xC2B2AE3D;
constexpr std::uint32_t kPrime4 = 0x27D4EB2F;
constexpr std::uint32_t kPrime5 = 0x165667B1;

std::uint32_t mix(std::uint32_t lane, const std::byte* word) {
  return std::rotl(lane + load<std::uint32_t>(word) * kPrime2, 13) * kPrime1;
}

}  // namespace

std::uint32_t checksum(std::span<const std::byte> bytes, std::uint32_t seed) {
  const std::byte* next = bytes.data();
  std::size_t left = bytes.size();
  std::uint32_t hash = seed + kPrime5;
  if (left >= 16) {
    // Four lanes that do not wait for each other.
    std::uint32_t a = seed + kPrime1 + kPrime2, b = seed + kPrime2, c = seed, d = seed - kPrime1;
    for (; left >= 16; left -= 16, next += 16) {
      a = mix(a, next);
      b = mix(b, next + 4);
      c = mix(c, next + 8);
      d = mix(d, next + 12);
    }
    hash = std::rotl(a, 1) + std::rotl(b, 7) + std::rotl(c, 12) + std::rotl(d, 18);
  }
  hash += static_cast<std::uint32_t>(bytes.size());
  for (; left >= 4; left -= 4, next += 4) {
    hash = std::rotl(hash + load<std::uint32_t>(next) * kPrime3, 17) * kPrime4;
  }
  for (; left > 0; --left, ++next) {
    hash = std::rotl(hash + static_cast<std::uint32_t>(*next) * kPrime5, 11) * kPrime1;
  }
  hash = (hash ^ (hash >> 15)) * kPrime2;
  hash = (hash ^ (hash >> 13)) * kPrime3;
  return hash ^ (hash >> 16);
}

}  // namespace topreduce::wire
