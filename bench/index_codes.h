#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

// Other ways to write ascending indices than wire/rice.h, for comparison.

namespace topreduce::bench {

/// Elias-Fano: the low bits of every index side by side, the high ones in unary.
class EliasFano {
 public:
  void encode(std::span<const std::uint32_t> indices, std::uint64_t universe) {
    const std::uint64_t share = universe / std::max<std::size_t>(1, indices.size());
    low_bits_ = share > 1 ? static_cast<unsigned>(std::bit_width(share)) - 1 : 0;
    low_.assign((indices.size() * low_bits_ + 63) / 64 + 1, 0);
    high_.assign((indices.size() + (universe >> low_bits_)) / 64 + 1, 0);
    const std::uint64_t mask = (std::uint64_t{1} << low_bits_) - 1;
    for (std::size_t i = 0; i < indices.size(); ++i) {
      const std::size_t at = i * low_bits_;
      low_[at / 64] |= (indices[i] & mask) << at % 64;
      if (at % 64 + low_bits_ > 64) low_[at / 64 + 1] |= (indices[i] & mask) >> (64 - at % 64);
      const std::size_t bit = (indices[i] >> low_bits_) + i;
      high_[bit / 64] |= std::uint64_t{1} << bit % 64;
    }
  }

  void decode(std::span<std::uint32_t> indices) const {
    const std::uint64_t mask = (std::uint64_t{1} << low_bits_) - 1;
    std::size_t i = 0;
    for (std::size_t w = 0; i < indices.size(); ++w) {
      for (std::uint64_t word = high_[w]; word != 0 && i < indices.size(); word &= word - 1, ++i) {
        const std::size_t at = i * low_bits_;
        std::uint64_t low = low_[at / 64] >> at % 64;
        if (at % 64 + low_bits_ > 64) low |= low_[at / 64 + 1] << (64 - at % 64);
        const std::size_t high = w * 64 + static_cast<std::size_t>(std::countr_zero(word)) - i;
        indices[i] = static_cast<std::uint32_t>(high << low_bits_ | (low & mask));
      }
    }
  }

  std::size_t bits() const { return 64 * (low_.size() + high_.size()); }

 private:
  unsigned low_bits_ = 0;
  std::vector<std::uint64_t> low_, high_;
};

/// A bit for every 64 places that have an entry, then a bitmap of each of those.
class BlockBitmap {
 public:
  void encode(std::span<const std::uint32_t> indices, std::uint64_t universe) {
    used_.assign(universe / 4096 + 1, 0);
    maps_.clear();
    std::uint64_t last = ~std::uint64_t{0};
    for (const std::uint32_t index : indices) {
      const std::uint64_t block = index / 64;
      if (block != last) {
        used_[block / 64] |= std::uint64_t{1} << block % 64;
        maps_.push_back(0);
        last = block;
      }
      maps_.back() |= std::uint64_t{1} << index % 64;
    }
  }

  void decode(std::span<std::uint32_t> indices) const {
    std::size_t i = 0, map = 0;
    for (std::size_t w = 0; w < used_.size(); ++w) {
      for (std::uint64_t used = used_[w]; used != 0; used &= used - 1) {
        const std::size_t block = w * 64 + static_cast<std::size_t>(std::countr_zero(used));
        for (std::uint64_t word = maps_[map]; word != 0; word &= word - 1) {
          indices[i++] = static_cast<std::uint32_t>(
              block * 64 + static_cast<std::size_t>(std::countr_zero(word)));
        }
        ++map;
      }
    }
  }

  std::size_t bits() const { return 64 * (used_.size() + maps_.size()); }

 private:
  std::vector<std::uint64_t> used_, maps_;
};

}  // namespace topreduce::bench
