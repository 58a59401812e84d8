#include "topreduce/sparse_vector.h"

#include <algorithm>
#include <bit>

namespace topreduce {
namespace {

constexpr std::size_t kBlock = 1 << 15;  // 128 kB of floats: stays in the second-level cache

}  // namespace

void Adder::add(std::span<const SparseVector> parts, Index universe, SparseVector& sum) {
  std::size_t most = 0;
  for (const SparseVector& part : parts) most += part.size();
  most = std::min<std::size_t>(most, universe);
  sum.resize(most);

  block_.resize(kBlock);
  touched_.assign(kBlock / 64, 0);
  next_.assign(parts.size(), 0);
  std::size_t count = 0;
  for (std::size_t start = 0; start < universe && most > 0; start += kBlock) {
    const std::size_t end = std::min<std::size_t>(universe, start + kBlock);
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const SparseVector& part = parts[p];
      std::size_t& i = next_[p];
      for (; i < part.size() && part.indices[i] < end; ++i) {
        const std::size_t at = part.indices[i] - start;
        std::uint64_t& word = touched_[at / 64];
        const std::uint64_t bit = std::uint64_t{1} << (at % 64);
        block_[at] = (word & bit) != 0 ? block_[at] + part.values[i] : part.values[i];
        word |= bit;
      }
    }
    for (std::size_t w = 0; w * 64 < end - start; ++w) {
      for (std::uint64_t word = touched_[w]; word != 0; word &= word - 1) {
        const std::size_t at = w * 64 + static_cast<std::size_t>(std::countr_zero(word));
        sum.indices[count] = static_cast<Index>(start + at);
        sum.values[count] = block_[at];
        ++count;
      }
      touched_[w] = 0;
    }
  }
  sum.resize(count);
}

}  // namespace topreduce
