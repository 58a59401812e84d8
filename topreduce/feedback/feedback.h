#pragma once

#include <span>

#include "topreduce/exchange/delivery.h"
#include "topreduce/pending.h"
#include "topreduce/state.h"

namespace topreduce::feedback {

/// What a rank remembers of what it did not send. The vector of a step is always
/// base + scale * gradient; feedbacks differ in what they make of it afterwards.
class Feedback {
 public:
  virtual ~Feedback() = default;

  /// Flat over the model, or empty for zeros.
  virtual std::span<const float> base() const = 0;
  virtual float scale() const { return 1; }

  /// The step was voted through. For one exchange: takes what was settled off the memory and
  /// replaces its gradients with the mean over `ranks`, times `unit` (the loss scale). Returns by
  /// how much the energy of `pending` went down.
  virtual double commit(const Pending& pending, const exchange::Delivery& delivery, int ranks,
                        float unit) = 0;

  virtual void visit(StateVisitor& visitor) = 0;
};

}  // namespace topreduce::feedback
