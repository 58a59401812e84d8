#include "topreduce/pending.h"

#include <cassert>

namespace topreduce {
namespace {

Index end_of(std::span<const Segment> segments) {
  Index end = 0;
  for (const Segment& segment : segments) {
    assert(segment.start >= end);
    end = segment.start + static_cast<Index>(segment.size());
  }
  return end;
}

}  // namespace

Pending::Pending(std::span<const Segment> segments, std::span<const float> base, float scale,
                 const Drift& drift)
    : segments_(segments), base_(base), scale_(scale), drift_(drift), size_(end_of(segments)) {}

Pending::Pending(std::span<const Segment> segments, Device& device, Device::Base base, float scale)
    : segments_(segments),
      scale_(scale),
      device_(&device),
      on_device_(base),
      size_(end_of(segments)) {}

kernels::Terms Pending::terms(const Segment& segment) const {
  const auto base = base_.empty() ? base_ : base_.subspan(segment.offset, segment.size());
  return {base, segment.gradient, scale_};
}

kernels::Seen Pending::survey() const {
  if (device_ != nullptr) return device_->survey();
  kernels::Seen seen;
  for (const Segment& segment : segments_) kernels::survey(terms(segment), seen);
  return seen;
}

void Pending::evaluate(std::span<float> values) const {
  if (device_ != nullptr) return device_->evaluate(values);
  for (const Segment& segment : segments_) {
    kernels::evaluate(terms(segment), values.subspan(segment.start, segment.size()));
  }
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
