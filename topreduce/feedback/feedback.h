#pragma once

#include <span>

#include "topreduce/compensated_gradient.h"
#include "topreduce/exchange/result.h"
#include "topreduce/state.h"
#include "topreduce/storage.h"

namespace topreduce::feedback {

/// What a rank remembers of what it did not send. The vector of a step is always
/// base + scale * gradient; feedbacks differ in what they make of it afterwards.
///
/// Some remember what they owe (residual), others an estimate of the gradient (ef21): these owe
/// nothing, send differences, and start from a step that sends every gradient as it is.
class Feedback {
 public:
  virtual ~Feedback() = default;

  /// Flat over the model, or empty for zeros.
  virtual std::span<const float> base() const = 0;
  /// Whether it has a base, be it here or on a device.
  virtual bool has_base() const { return !base().empty(); }
  virtual float scale() const { return 1; }

  /// How it moves on by itself.
  virtual Drift drift() const { return {}; }

  /// Flat over the model, or empty if this memory owes nothing.
  virtual std::span<const float> owed() const { return base(); }

  /// Whether it is an estimate: a step that sends everything then sends plain gradients
  /// (CompensatedGradient::plain), and the estimate starts anew from them.
  virtual bool is_estimate() const { return false; }
  /// False as long as the next step must send everything.
  virtual bool started() const { return true; }

  /// Whether any part of a sum can be given back to the ranks and stay owed.
  virtual bool takes_back() const { return false; }

  /// Whether it adds up gradients beside its base, so that they must be small enough themselves.
  virtual bool keeps_gradients() const { return false; }

  /// The mean that a delivery is added to before it is handed out, times `sign`; empty for none.
  struct HeldMean {
    std::span<const float> values;
    float sign = 1;
  };
  virtual HeldMean held_mean() const { return {}; }

  /// The largest magnitude that `commit` would hand out of one segment. Changes nothing.
  float largest_mean(const CompensatedGradient& compensated, const Segment& segment,
                     const exchange::Result& result, int ranks, float unit) const;

  /// The step was voted through. For one exchange: takes what was settled off the memory and
  /// replaces its gradients with the mean over `ranks`, times `unit` (the loss scale). Returns by
  /// how much the energy of `compensated` went down.
  virtual double commit(const CompensatedGradient& compensated, const exchange::Result& result,
                        int ranks, float unit) = 0;

  /// `commit` in two parts, for gradients that are lent; the first may be taken back.
  virtual bool settles_early() const { return false; }
  /// Takes `gradient`, entries of the memory from `offset` on, into the memory, times `scale`; it
  /// becomes what was there before. Returns as kernels::absorb_and_save does.
  virtual std::uint32_t take_in(std::size_t, std::span<float>, float) noexcept { return 0; }
  /// Takes gradients in, unless they were, and takes what was settled off the memory. Returns as
  /// `commit` does.
  virtual double settle(const CompensatedGradient&, const exchange::Result&) { return 0; }
  /// The memory of a segment becomes again what `take_in` found; its gradient becomes zeros.
  virtual void unsettle(const Segment&) noexcept {}
  /// Writes the mean over `ranks`, times `unit`, to where it goes.
  static void hand_out(const CompensatedGradient& compensated, const exchange::Result& result,
                       int ranks, float unit);

  /// Moves what it remembers to `device`, null for main memory, where `base` then shows it. False,
  /// and no change, if it cannot live on a device.
  virtual bool move_to(Device* device) { return device == nullptr; }

  virtual void visit(StateVisitor& visitor) = 0;
};

}  // namespace topreduce::feedback
