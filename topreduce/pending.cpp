#include "topreduce/pending.h"

#include <array>
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
                 const Drift& drift, Threads& threads)
    : segments_(segments),
      base_(base),
      scale_(scale),
      drift_(drift),
      threads_(threads),
      size_(end_of(segments)) {}

Pending::Pending(std::span<const Segment> segments, Device& device, Device::Base base, float scale)
    : segments_(segments),
      scale_(scale),
      device_(&device),
      on_device_(base),
      threads_(Threads::none()),
      size_(end_of(segments)) {}

kernels::Terms Pending::terms(const Segment& segment) const {
  const auto base = base_.empty() ? base_ : base_.subspan(segment.offset, segment.size());
  return {base, segment.gradient, scale_};
}

kernels::Seen Pending::survey() const {
  if (device_ != nullptr) return device_->survey();
  const Stretches stretches(size_);
  std::array<kernels::Seen, Stretches::kMost> seen;
  threads_.for_each(stretches.count(), [&](std::size_t s) {
    visit(stretches.begin(s), stretches.begin(s + 1),
          [&](const Segment& segment, std::size_t first, std::size_t count) {
            kernels::survey(terms(segment).part(first, count), seen[s]);
          });
  });
  return kernels::together(std::span(seen).first(stretches.count()));
}

kernels::Seen Pending::survey_gradients() const {
  assert(device_ == nullptr);
  return Pending(segments_, {}, scale_, {}, threads_).survey();
}

void Pending::evaluate(std::span<float> values) const {
  if (device_ != nullptr) return device_->evaluate(values);
  const Stretches stretches(size_);
  threads_.for_each(stretches.count(), [&](std::size_t s) {
    visit(stretches.begin(s), stretches.begin(s + 1),
          [&](const Segment& segment, std::size_t first, std::size_t count) {
            kernels::evaluate(terms(segment).part(first, count),
                              values.subspan(segment.start + first, count));
          });
  });
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
