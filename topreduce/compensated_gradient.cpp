#include "topreduce/compensated_gradient.h"

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

CompensatedGradient::CompensatedGradient(std::span<const Segment> segments,
                                         std::span<const float> base, float scale,
                                         const Drift& drift, Threads& threads)
    : segments_(segments),
      base_(base),
      scale_(scale),
      drift_(drift),
      threads_(threads),
      size_(end_of(segments)) {}

CompensatedGradient::CompensatedGradient(std::span<const Segment> segments, Device& device,
                                         Device::Base base, float scale)
    : segments_(segments),
      scale_(scale),
      device_(&device),
      on_device_(base),
      threads_(Threads::none()),
      size_(end_of(segments)) {}

kernels::Terms CompensatedGradient::terms(const Segment& segment) const {
  const auto base = base_.empty() ? base_ : base_.subspan(segment.offset, segment.size());
  if (is_taken_in_) return {{}, base, 1};
  return {base, segment.gradient, scale_};
}

kernels::Summary CompensatedGradient::summarize() const {
  if (device_ != nullptr) return device_->summarize();
  const Chunks chunks(size_);
  std::array<kernels::Summary, Chunks::kMost> summary;
  threads_.for_each(chunks.count(), [&](std::size_t s) {
    visit(chunks.begin(s), chunks.begin(s + 1),
          [&](const Segment& segment, std::size_t first, std::size_t count) {
            kernels::summarize(terms(segment).part(first, count), summary[s]);
          });
  });
  return kernels::combine(std::span(summary).first(chunks.count()));
}

kernels::Summary CompensatedGradient::summarize_gradients() const {
  assert(device_ == nullptr && !is_taken_in_);
  return CompensatedGradient(segments_, {}, scale_, {}, threads_).summarize();
}

void CompensatedGradient::evaluate(std::span<float> values) const {
  if (device_ != nullptr) return device_->evaluate(values);
  const Chunks chunks(size_);
  threads_.for_each(chunks.count(), [&](std::size_t s) {
    visit(chunks.begin(s), chunks.begin(s + 1),
          [&](const Segment& segment, std::size_t first, std::size_t count) {
            kernels::evaluate(terms(segment).part(first, count),
                              values.subspan(segment.start + first, count));
          });
  });
}

void CompensatedGradient::gather(std::span<const Index> indices, std::span<float> values) const {
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
