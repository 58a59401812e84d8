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

void Sample::take(const Segment& segment, const kernels::Terms& terms) {
  const std::size_t first = (stride_ - segment.offset % stride_) % stride_;
  for (std::size_t i = first; i < terms.size(); i += stride_) values_.push_back(terms[i]);
}

float Sample::kth_magnitude(std::size_t k, double deviations) {
  const double expected = static_cast<double>(k) / static_cast<double>(stride_);
  const double rank = std::ceil(expected + deviations * std::sqrt(expected + 1));
  if (rank > static_cast<double>(values_.size())) return 0;
  return kernels::kth_magnitude(values_, std::max<std::size_t>(1, static_cast<std::size_t>(rank)));
}

}  // namespace topreduce::select
