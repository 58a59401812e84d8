#pragma once

#include "topreduce/pending.h"

namespace topreduce::select {

/// Magnitudes at evenly spaced places of the flat memory: the same places however the model is cut.
class Sample {
 public:
  /// Starts over; about `size` places out of `model` entries.
  void begin(std::size_t model, std::size_t size);

  /// Takes this segment's places. Cheap right after a pass has brought it into the cache.
  void take(const Segment& segment, const kernels::Terms& terms);

  /// A guess of the k-th largest magnitude of all entries, low enough that about `deviations`
  /// standard deviations of the sampling error lie between it and the truth. 0 if it cannot tell.
  float kth_magnitude(std::size_t k, double deviations);

 private:
  std::size_t stride_ = 1;
  Buffer<float> values_;
};

}  // namespace topreduce::select
