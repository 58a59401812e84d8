#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "topreduce/layout.h"

namespace topreduce {

/// Which parameters are exchanged together, and in which order. No result depends on it, but all
/// ranks must have the same.
class BucketPlan {
 public:
  BucketPlan() = default;
  /// Fills buckets with whole parameters in `order`, which names each once: a bucket is full when
  /// it has `cap` entries or more, or a share of the model that makes kMost buckets at most.
  BucketPlan(const Layout& layout, std::span<const std::size_t> order, std::size_t cap);

  static constexpr std::size_t kMost = 64;

  std::size_t count() const { return starts_.size() - 1; }
  /// The parameters of a bucket, ascending.
  std::span<const std::size_t> operator[](std::size_t bucket) const {
    return std::span(parameters_).subspan(starts_[bucket], starts_[bucket + 1] - starts_[bucket]);
  }
  std::size_t bucket_of(std::size_t parameter) const { return bucket_of_[parameter]; }

 private:
  std::vector<std::size_t> parameters_;    // bucket after bucket
  std::vector<std::size_t> starts_ = {0};  // of buckets in them, and the end
  std::vector<std::size_t> bucket_of_;
};

/// As a backward pass mostly brings them: the last parameter first.
std::vector<std::size_t> reverse_order(const Layout& layout);

/// Whether `order` names each of `parameters` parameters once.
bool is_order(std::span<const std::size_t> order, std::size_t parameters);

}  // namespace topreduce
