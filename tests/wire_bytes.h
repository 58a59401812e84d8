#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "topreduce/storage.h"
#include "topreduce/wire/seal.h"

// What the tests of the wire share.

namespace topreduce::wire {

template <class A, class B>
bool equal_bits(const A& a, const B& b) {
  return std::ranges::equal(std::as_bytes(std::span(a)), std::as_bytes(std::span(b)));
}

/// A message as an exchange sends it.
inline Bytes sealed(const Identity& identity, std::uint32_t round,
                    std::span<const std::byte> payload) {
  Bytes message;
  append(message, seal(identity, round, payload));
  append(message, payload);
  return message;
}

}  // namespace topreduce::wire
