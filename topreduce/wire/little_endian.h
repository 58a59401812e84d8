#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

// Numbers travel with their lowest byte first, whatever the machine.

namespace topreduce::wire {

/// Whether numbers, and vectors of them, may be copied as they lie in memory.
inline constexpr bool kLittleEndian = std::endian::native == std::endian::little;

template <std::unsigned_integral T>
void store(std::byte* out, T value) {
  if constexpr (kLittleEndian) {
    std::memcpy(out, &value, sizeof(T));
  } else {
    for (std::size_t i = 0; i < sizeof(T); ++i) out[i] = static_cast<std::byte>(value >> (8 * i));
  }
}

template <std::unsigned_integral T>
T load(const std::byte* in) {
  T value = 0;
  if constexpr (kLittleEndian) {
    std::memcpy(&value, in, sizeof(T));
  } else {
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      value = static_cast<T>(value | (static_cast<T>(in[i]) << (8 * i)));
    }
  }
  return value;
}

/// The eight bytes from `at` on; zeros past the end.
inline std::uint64_t load_up_to(std::span<const std::byte> bytes, std::size_t at) {
  if (at + 8 <= bytes.size()) return load<std::uint64_t>(bytes.data() + at);
  std::uint64_t value = 0;
  for (std::size_t i = at; i < bytes.size(); ++i) {
    value |= static_cast<std::uint64_t>(bytes[i]) << 8 * (i - at);
  }
  return value;
}

}  // namespace topreduce::wire
