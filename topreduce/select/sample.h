#pragma once

#include "topreduce/compensated_gradient.h"
#include "topreduce/kernels/kernels.h"

namespace topreduce::select {

/// Values at evenly spaced places of the flat memory: the same places, in the same order, however
/// the model is cut. Complete once all of the model was taken.
class Sample {
 public:
  /// Starts over; about `size` places out of `model` entries.
  void begin(std::size_t model, std::size_t size);

  /// Takes the values at the places of a stretch that starts at `offset` of the flat memory.
  void take(std::size_t offset, const kernels::Terms& terms);

  /// Takes what these places may hold in the next step if everything from `cut` up is sent now:
  /// what is left and what drifts there, plus or minus this step's gradient by turns.
  void foresee(std::size_t offset, const kernels::Terms& terms, float cut, const Drift& drift);

  /// Where the places begin in each segment.
  std::span<const std::size_t> firsts(const CompensatedGradient& compensated);

  /// `take` for all of `compensated`, which may be on a device.
  void take(const CompensatedGradient& compensated);
  /// `foresee` for all of `compensated` on a device, where nothing drifts. `cuts`: one for each
  /// segment.
  void foresee_on_device(const CompensatedGradient& compensated, std::span<const float> cuts);

  /// A guess of the k-th largest magnitude of all entries, low enough that about `deviations`
  /// standard deviations of the sampling error lie between it and the truth. 0 if it cannot tell.
  float kth_magnitude(std::size_t k, double deviations) const;

  std::span<const float> values() const { return values_; }
  /// As a part of the whole: one value stands for so many entries.
  double stride() const { return static_cast<double>(stride_); }

 private:
  std::size_t first_place(std::size_t offset) const {
    return (stride_ - offset % stride_) % stride_;
  }

  void note(std::size_t number, float left, float gradient);
  // visit(segment, place in the flat memory, x, scaled gradient)
  template <class Visit>
  void visit_on_device(const CompensatedGradient& compensated, Visit&& visit);

  std::size_t stride_ = 1;
  Buffer<float> values_;
  std::vector<std::size_t> firsts_;
  Buffer<float> sampled_, gradients_;
};

}  // namespace topreduce::select
