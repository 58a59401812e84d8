#pragma once

#include <cstdint>
#include <string_view>

namespace topreduce {

/// A number that tells sequences apart (FNV-1a); not a secret.
class Fingerprint {
 public:
  Fingerprint& add(std::uint64_t word) {
    hash_ = (hash_ ^ word) * 0x100000001b3u;
    hash_ ^= hash_ >> 32;
    return *this;
  }
  Fingerprint& add(std::string_view text) {
    for (const char c : text) hash_ = (hash_ ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    return *this;
  }

  std::uint64_t long_value() const { return hash_; }
  std::uint32_t value() const { return static_cast<std::uint32_t>(hash_ ^ hash_ >> 32); }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325u;
};

}  // namespace topreduce
