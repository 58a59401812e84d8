#pragma once

#include "topreduce/sparse_vector.h"

namespace topreduce::exchange {

/// What an exchange brought. Law: over the ranks, the sum of `settled` is `sum`.
/// Either everything was delivered (`whole`), or the entries listed.
struct Result {
  enum class Extent { entries, whole };
  Extent extent = Extent::entries;

  // entries:
  SparseVector sum;      ///< the same bits on every rank
  SparseVector settled;  ///< what this rank no longer owes; may hold entries it never selected
  // whole:
  Buffer<float> dense_sum;      ///< one value per entry of the exchange
  Buffer<float> dense_settled;  ///< empty: this rank settled all it had

  std::size_t delivered() const { return extent == Extent::whole ? dense_sum.size() : sum.size(); }
  void clear() {
    extent = Extent::entries;
    sum.clear();
    settled.clear();
    dense_sum.clear();
    dense_settled.clear();
  }
};

}  // namespace topreduce::exchange
