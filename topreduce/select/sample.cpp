#include "topreduce/select/sample.h"

#include <algorithm>
#include <cmath>

namespace topreduce::select {

void Sample::begin(std::size_t model, std::size_t size) {
  // An odd stride does not march in step with the rows of a matrix.
  stride_ = std::max<std::size_t>(1, model / size) | 1;
  values_.resize((model + stride_ - 1) / stride_);
}

void Sample::take(std::size_t offset, const kernels::Terms& terms) {
  std::size_t i = first_place(offset);
  for (std::size_t number = (offset + i) / stride_; i < terms.size(); i += stride_, ++number) {
    values_[number] = terms[i];
  }
}

void Sample::foresee(std::size_t offset, const kernels::Terms& terms, float cut,
                     const Drift& drift) {
  const bool drifts = !drift.velocity.empty();
  std::size_t i = first_place(offset);
  for (std::size_t number = (offset + i) / stride_; i < terms.size(); i += stride_, ++number) {
    const float x = terms[i];
    const bool sent = std::abs(x) >= cut;
    float left = terms.base.empty() || sent ? 0 : x;
    const float gradient = terms.scale * terms.gradient[i];
    if (drifts && !(sent && drift.sent == Drift::Sent::stop)) {
      left += drift.at(offset + i, gradient);
    }
    note(number, left, gradient);
  }
}

void Sample::note(std::size_t number, float left, float gradient) {
  values_[number] = number % 2 == 0 ? left + gradient : left - gradient;
}

std::span<const std::size_t> Sample::firsts(const CompensatedGradient& compensated) {
  firsts_.clear();
  for (const Segment& segment : compensated.segments()) {
    firsts_.push_back(first_place(segment.offset));
  }
  return firsts_;
}

template <class Visit>
void Sample::visit_on_device(const CompensatedGradient& compensated, Visit&& visit) {
  firsts(compensated);
  compensated.device()->sample(firsts_, stride_, sampled_, gradients_);
  std::size_t next = 0, number = 0;
  for (const Segment& segment : compensated.segments()) {
    for (std::size_t i = firsts_[number]; i < segment.size(); i += stride_, ++next) {
      visit(number, segment.offset + i, sampled_[next], gradients_[next]);
    }
    ++number;
  }
}

void Sample::take(const CompensatedGradient& compensated) {
  if (compensated.device() != nullptr) {
    return visit_on_device(compensated, [&](std::size_t, std::size_t place, float x, float) {
      values_[place / stride_] = x;
    });
  }
  for (const Segment& segment : compensated.segments()) {
    take(segment.offset, compensated.terms(segment));
  }
}

void Sample::foresee_on_device(const CompensatedGradient& compensated,
                               std::span<const float> cuts) {
  visit_on_device(compensated,
                  [&](std::size_t segment, std::size_t place, float x, float gradient) {
                    const bool sent = std::abs(x) >= cuts[segment];
                    note(place / stride_, compensated.plain() || sent ? 0 : x, gradient);
                  });
}

float Sample::kth_magnitude(std::size_t k, double deviations) const {
  const double expected = static_cast<double>(k) / static_cast<double>(stride_);
  const double rank = std::max(1.0, std::round(expected + deviations * std::sqrt(expected + 1)));
  if (rank > static_cast<double>(values_.size())) return 0;
  return kernels::kth_magnitude(values_, static_cast<std::size_t>(rank));
}

}  // namespace topreduce::select
