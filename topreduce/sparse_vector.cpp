#include "topreduce/sparse_vector.h"

#include <algorithm>

#include "topreduce/kernels/kernels.h"

namespace topreduce {
namespace {

constexpr std::size_t kBlock = 1 << 13;  // 40 kB with its flags

}  // namespace

void Adder::add(std::span<const SparseVector> parts, Index universe, SparseVector& sum) {
  std::size_t most = 0;
  for (const SparseVector& part : parts) most += part.size();
  most = std::min<std::size_t>(most, universe);
  sum.resize(most);

  block_.assign(std::min<std::size_t>(universe, kBlock), kernels::kNothing);
  touched_.assign(block_.size(), 0);
  float* const block = block_.data();
  std::uint8_t* const touched = touched_.data();
  next_.assign(parts.size(), 0);
  std::size_t count = 0;
  for (std::size_t start = 0; start < universe && most > 0; start += kBlock) {
    const std::size_t size = std::min<std::size_t>(universe - start, kBlock);
    std::size_t here = 0;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const Index* const indices = parts[p].indices.data();
      const float* const values = parts[p].values.data();
      const std::size_t part_size = parts[p].size();
      std::size_t i = next_[p];
      for (; i < part_size; ++i) {
        const std::size_t at = indices[i] - start;
        if (at >= size) break;
        block[at] += values[i];
        touched[at] = 1;
      }
      here += i - next_[p];
      next_[p] = i;
    }
    if (here == 0) continue;
    // The kernel may write a little further than it says: not where the sum ends.
    const bool ends = count + here + kernels::kTakeSlack > most;
    SparseVector& out = ends ? end_ : sum;
    if (ends) end_.resize(size + kernels::kTakeSlack);
    const std::size_t at = ends ? 0 : count;
    const std::size_t found =
        kernels::take_sums(std::span(touched, size), block, static_cast<Index>(start),
                           out.indices.data() + at, out.values.data() + at);
    if (ends) {
      std::copy_n(end_.indices.data(), found, sum.indices.data() + count);
      std::copy_n(end_.values.data(), found, sum.values.data() + count);
    }
    count += found;
  }
  sum.resize(count);
}

}  // namespace topreduce
