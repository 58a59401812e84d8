#pragma once

#include <cstddef>
#include <span>

namespace topreduce {

/// What a rank has to say of a step beside its gradients.
struct Participation {
  /// joined: out of data. Its gradients are zeros, and it brings only what it owes.
  enum class Presence { present, joined } presence = Presence::present;
  /// What sums are divided by: the number of all ranks, or of those that are present.
  enum class Divisor { ranks, present } divisor = Divisor::ranks;
  /// Parameters that this rank did not use: their gradients are zeros. What no rank used is not
  /// delivered. A rank that has joined used none.
  std::span<const std::size_t> unused;
};

}  // namespace topreduce
