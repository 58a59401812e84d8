#pragma once

#include <cstddef>
#include <cstdint>

namespace topreduce {

/// What a step may spend, over the whole model. Only the Reducer decides it.
struct Budget {
  std::uint64_t step = 0;
  std::uint64_t seed = 0;
  std::size_t entries = 0;  ///< k: entries that this rank should send in this step
  std::size_t model = 0;    ///< n: entries it chooses from, over all exchanges of the step
  double density = 1;       ///< k / n before k was rounded
  /// Whether a step is one exchange for the whole model, or one for each bucket as it comes.
  enum class Exchanges { one, many } exchanges = Exchanges::many;
};

}  // namespace topreduce
