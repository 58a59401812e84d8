#include "topreduce/select/sample.h"

#include <algorithm>
#include <cmath>

namespace topreduce::select {

void Sample::begin(std::size_t model, std::size_t size) {
  // An odd stride does not march in step with the rows of a matrix.
  stride_ = std::max<std::size_t>(1, model / size) | 1;
  values_.clear();
  values_.reserve(model / stride_ + 1);
}

void Sample::take(std::size_t offset, const kernels::Terms& terms) {
  for (std::size_t i = first_place(offset); i < terms.size(); i += stride_) {
    values_.push_back(terms[i]);
  }
}

void Sample::foresee(std::size_t offset, const kernels::Terms& terms, float cut) {
  for (std::size_t i = first_place(offset); i < terms.size(); i += stride_) {
    const float x = terms[i];
    const float left = terms.base.empty() || std::abs(x) >= cut ? 0 : x;
    const float gradient = terms.scale * terms.gradient[i];
    values_.push_back((offset + i) / stride_ % 2 == 0 ? left + gradient : left - gradient);
  }
}

float Sample::kth_magnitude(std::size_t k, double deviations) const {
  const double expected = static_cast<double>(k) / static_cast<double>(stride_);
  const double rank = std::max(1.0, std::round(expected + deviations * std::sqrt(expected + 1)));
  if (rank > static_cast<double>(values_.size())) return 0;
  return kernels::kth_magnitude(values_, static_cast<std::size_t>(rank));
}

}  // namespace topreduce::select
