#pragma once

#include "topreduce/device.h"
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

  /// How many sums a device keeps (Device::add_up), under `key` and at the runs, or everywhere;
  /// what stands above is empty then, until they are brought.
  std::size_t on_device = 0;
  std::uint32_t key = 0;
  Buffer<Device::Run> runs;

  std::size_t delivered() const {
    if (on_device > 0) return on_device;
    return extent == Extent::whole ? dense_sum.size() : sum.size();
  }
  void clear() {
    extent = Extent::entries;
    on_device = 0;
    runs.clear();
    sum.clear();
    settled.clear();
    dense_sum.clear();
    dense_settled.clear();
  }
};

/// Sums that a device keeps come to main memory; x must be open there.
void bring(Device& device, Result& result);

}  // namespace topreduce::exchange
