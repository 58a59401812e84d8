#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstring>

// Numbers travel with their lowest byte first, whatever the machine.

namespace topreduce::wire {

template <std::unsigned_integral T>
void store(std::byte* out, T value) {
  if constexpr (std::endian::native == std::endian::little) {
    std::memcpy(out, &value, sizeof(T));
  } else {
    for (std::size_t i = 0; i < sizeof(T); ++i) out[i] = static_cast<std::byte>(value >> (8 * i));
  }
}

template <std::unsigned_integral T>
T load(const std::byte* in) {
  T value = 0;
  if constexpr (std::endian::native == std::endian::little) {
    std::memcpy(&value, in, sizeof(T));
  } else {
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      value = static_cast<T>(value | (static_cast<T>(in[i]) << (8 * i)));
    }
  }
  return value;
}

}  // namespace topreduce::wire
