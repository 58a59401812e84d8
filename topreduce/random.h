#pragma once

#include <array>
#include <cstdint>

namespace topreduce {

/// Random numbers without a state: the i-th number of a stream is a function of (seed, step,
/// purpose, i), so all ranks draw the same, in any order, and a resumed run draws them again.
/// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011).
class RandomStream {
 public:
  /// Streams with another purpose share no number.
  enum class Purpose : std::uint32_t { places = 1, caps = 2, sketch = 3, rows = 4, sample = 5 };

  RandomStream(std::uint64_t seed, std::uint64_t step, Purpose purpose)
      : key_{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)},
        step_(step),
        purpose_(static_cast<std::uint32_t>(purpose)) {}

  using Block = std::array<std::uint32_t, 4>;

  /// 128 random bits.
  Block block(std::uint32_t i) const {
    Block x = {i, purpose_, static_cast<std::uint32_t>(step_),
               static_cast<std::uint32_t>(step_ >> 32)};
    std::uint32_t key0 = key_[0], key1 = key_[1];
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t a = std::uint64_t{0xD2511F53u} * x[0];
      const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * x[2];
      x = {static_cast<std::uint32_t>(b >> 32) ^ x[1] ^ key0, static_cast<std::uint32_t>(b),
           static_cast<std::uint32_t>(a >> 32) ^ x[3] ^ key1, static_cast<std::uint32_t>(a)};
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    return x;
  }

  /// 64 of them.
  std::uint64_t operator()(std::uint32_t i) const {
    const Block x = block(i);
    return std::uint64_t{x[1]} << 32 | x[0];
  }

  /// A whole number below `bound` (below 2^32), by the upper half of a product.
  std::uint32_t below(std::uint32_t bound, std::uint32_t i) const {
    return static_cast<std::uint32_t>((((*this)(i) >> 32) * bound) >> 32);
  }

  /// A number in [0, 1).
  double unit(std::uint32_t i) const { return static_cast<double>((*this)(i) >> 11) * 0x1p-53; }

  /// A normal number with mean 0 and deviation 1: eight uniform ones added up, and what their sum
  /// lacks in the tails put right (Cornish and Fisher, first term). Only sums and products, so the
  /// same bits on every machine. Its distribution is off by less than 2e-4.
  double normal(std::uint32_t i) const {
    constexpr double kMean = 4 * 65535.0, kDeviation = 53509.91992145;  // sqrt(8 (2^32 - 1) / 12)
    constexpr double kTails = 1.2 / 8 / 24;
    std::uint32_t sum = 0;
    for (const std::uint32_t word : block(i)) sum += (word & 0xffff) + (word >> 16);
    const double x = (static_cast<double>(sum) - kMean) * (1 / kDeviation);
    const double tails = (x * x - 3) * x;
    return x + kTails * tails;
  }

 private:
  std::array<std::uint32_t, 2> key_;
  std::uint64_t step_;
  std::uint32_t purpose_;
};

}  // namespace topreduce
