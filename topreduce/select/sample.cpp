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
  for (std::size_t i = first_place(offset); i < terms.size(); i += stride_) {
    values_[(offset + i) / stride_] = terms[i];
  }
}

void Sample::foresee(std::size_t offset, const kernels::Terms& terms, float cut,
                     const Drift& drift) {
  for (std::size_t i = first_place(offset); i < terms.size(); i += stride_) {
    const float x = terms[i];
    const bool sent = std::abs(x) >= cut;
    float left = terms.base.empty() || sent ? 0 : x;
    const float gradient = terms.scale * terms.gradient[i];
    if (!drift.velocity.empty() && !(sent && drift.sent == Drift::Sent::stop)) {
      left += drift.at(offset + i, gradient);
    }
    const std::size_t place = (offset + i) / stride_;
    values_[place] = place % 2 == 0 ? left + gradient : left - gradient;
  }
}

float Sample::kth_magnitude(std::size_t k, double deviations) const {
  const double expected = static_cast<double>(k) / static_cast<double>(stride_);
  const double rank = std::max(1.0, std::round(expected + deviations * std::sqrt(expected + 1)));
  if (rank > static_cast<double>(values_.size())) return 0;
  return kernels::kth_magnitude(values_, static_cast<std::size_t>(rank));
}

}  // namespace topreduce::select
