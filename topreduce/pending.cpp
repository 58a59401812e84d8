#include "topreduce/pending.h"

#include <cassert>

namespace topreduce {

Pending::Pending(std::span<const Segment> segments, std::span<const float> base, float scale,
                 const Drift& drift)
    : segments_(segments), base_(base), scale_(scale), drift_(drift) {
  for (const Segment& segment : segments) {
    assert(segment.start >= size_);
    size_ = segment.start + static_cast<Index>(segment.size());
  }
}

kernels::Terms Pending::terms(const Segment& segment) const {
  const auto base = base_.empty() ? base_ : base_.subspan(segment.offset, segment.size());
  return {base, segment.gradient, scale_};
}

void Pending::gather(std::span<const Index> indices, std::span<float> values) const {
  std::size_t i = 0;
  for (const Segment& segment : segments_) {
    const kernels::Terms terms = this->terms(segment);
    for (; i < indices.size() && indices[i] - segment.start < segment.size(); ++i) {
      values[i] = terms[indices[i] - segment.start];
    }
  }
  assert(i == indices.size());
}

}  // namespace topreduce
