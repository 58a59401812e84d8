#include "topreduce/select/strongest.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace topreduce::select {
namespace {

constexpr std::size_t kBlock = 1 << 14;        // entries per call of the kernel
constexpr std::size_t kMinimumRoom = 1 << 15;  // candidates beyond 2 x limit before a cut pays

}  // namespace

void Strongest::begin(std::size_t limit, float floor) {
  limit_ = limit;
  floor_ = std::max(floor, kNonZero);
  count_ = 0;
}

void Strongest::look(const Pending& pending, kernels::Seen& seen) {
  if (pending.device() != nullptr) {
    seen = pending.survey();
    if (seen.finite() && limit_ > 0) look_on_device(*pending.device());
    return;
  }
  for (const Segment& segment : pending.segments()) {
    look(pending.terms(segment), segment.start, seen);
  }
}

void Strongest::look_on_device(Device& device) {
  cut_if_many();
  device.strongest(floor_, {&limit_, 1}, found_);
  candidates_.resize(count_ + found_.size());
  const auto end = static_cast<std::ptrdiff_t>(count_);
  std::ranges::copy(found_.indices, candidates_.indices.begin() + end);
  std::ranges::copy(found_.values, candidates_.values.begin() + end);
  count_ += found_.size();
}

// Later entries of the same magnitude lose the tie, so only stronger ones matter from here.
void Strongest::cut_if_many() {
  if (count_ > 2 * limit_ + kMinimumRoom) {
    floor_ = std::nextafter(cut(), std::numeric_limits<float>::infinity());
  }
}

void Strongest::look(const kernels::Terms& terms, Index first, kernels::Seen& seen) {
  if (limit_ == 0) return kernels::survey(terms, seen);
  for (std::size_t start = 0; start < terms.size(); start += kBlock) {
    const std::size_t block = std::min(kBlock, terms.size() - start);
    cut_if_many();
    if (candidates_.size() < count_ + block + kernels::kCollectSlack) {
      candidates_.resize(count_ + block + kernels::kCollectSlack);
    }
    count_ += kernels::collect_above(
        terms.part(start, block), floor_, first + static_cast<Index>(start),
        candidates_.indices.data() + count_, candidates_.values.data() + count_, seen);
  }
}

float Strongest::cut() {
  if (count_ == 0) return 0;
  const std::span<float> values(candidates_.values.data(), count_);
  const std::size_t kept = std::min(limit_, count_);
  const float weakest = kernels::kth_magnitude(values, kept);
  if (count_ <= limit_) return weakest;

  std::size_t stronger = 0;
  for (const float value : values) stronger += std::abs(value) > weakest;
  std::size_t ties = kept - stronger;
  std::size_t out = 0;
  for (std::size_t i = 0; i < count_ && out < kept; ++i) {
    const float magnitude = std::abs(values[i]);
    if (magnitude < weakest) continue;
    if (magnitude == weakest) {
      if (ties == 0) continue;
      --ties;
    }
    candidates_.indices[out] = candidates_.indices[i];
    values[out++] = values[i];
  }
  count_ = kept;
  return weakest;
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
