#include "topreduce/select/strongest.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "topreduce/topk_filter.h"

namespace topreduce::select {
namespace {

constexpr std::size_t kMinimumRoom = 1 << 15;  // candidates beyond 2 x limit before a cut pays

}  // namespace

void Strongest::begin(std::size_t limit, float floor) {
  limit_ = limit;
  floor_ = std::max(floor, kNonZero);
  count_ = 0;
}

void Strongest::look(const CompensatedGradient& compensated, kernels::Summary& summary) {
  if (compensated.device() != nullptr) {
    announce(*compensated.device());
    summary = compensated.summarize();
    if (summary.finite()) look_on_device(*compensated.device());
    return;
  }
  for (const Segment& segment : compensated.segments()) {
    look(compensated.terms(segment), segment.start, summary, compensated.threads());
  }
}

void Strongest::announce(Device& device) {
  cut_if_many();
  if (limit_ > 0) device.expect({.floor = floor_, .limits = {&limit_, 1}, .firsts = {}});
}

void Strongest::look_on_device(Device& device) {
  if (limit_ == 0) return;
  device.strongest(floor_, {&limit_, 1}, found_);
  append(found_, found_.size());
}

void Strongest::look_at_block(const kernels::Terms& block, Index first, kernels::Summary& summary) {
  if (limit_ == 0) return kernels::summarize(block, summary);
  make_space(block.size() + kernels::kCollectSlack);
  count_ += kernels::collect_above(block, floor_, first, candidates_.indices.data() + count_,
                                   candidates_.values.data() + count_, summary);
}

void Strongest::append(const SparseVector& later, std::size_t count) {
  make_space(count);
  const auto end = static_cast<std::ptrdiff_t>(count_);
  std::copy_n(later.indices.begin(), count, candidates_.indices.begin() + end);
  std::copy_n(later.values.begin(), count, candidates_.values.begin() + end);
  count_ += count;
}

// Later entries of the same magnitude lose the tie, so only stronger ones matter from here.
void Strongest::cut_if_many() {
  if (count_ > 2 * limit_ + kMinimumRoom) {
    floor_ = std::nextafter(cut(), std::numeric_limits<float>::infinity());
  }
}

void Strongest::make_space(std::size_t more) {
  cut_if_many();
  if (candidates_.size() < count_ + more) candidates_.resize(count_ + more);
}

float Strongest::cut() {
  if (count_ == 0) return 0;
  const std::span<float> values(candidates_.values.data(), count_);
  if (count_ <= limit_) return kernels::kth_magnitude(values, count_);

  TopkFilter filter(values, limit_);
  std::size_t out = 0;
  for (std::size_t i = 0; i < count_ && out < limit_; ++i) {
    if (!filter.keeps(values[i])) continue;
    candidates_.indices[out] = candidates_.indices[i];
    values[out++] = values[i];
  }
  count_ = limit_;
  return filter.weakest();
}

float Strongest::finish(SparseVector& selected) {
  const float weakest = cut();
  const std::size_t before = selected.size();
  selected.resize(before + count_);
  std::copy_n(candidates_.indices.begin(), count_,
              selected.indices.begin() + static_cast<std::ptrdiff_t>(before));
  std::copy_n(candidates_.values.begin(), count_,
              selected.values.begin() + static_cast<std::ptrdiff_t>(before));
  return weakest;
}

}  // namespace topreduce::select
