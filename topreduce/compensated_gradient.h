#pragma once

#include <algorithm>
#include <limits>
#include <span>
#include <vector>

#include "topreduce/device.h"
#include "topreduce/kernels/kernels.h"
#include "topreduce/sparse_vector.h"
#include "topreduce/threads.h"

namespace topreduce {

/// One parameter's stretch of an exchange.
struct Segment {
  std::size_t parameter = 0;       ///< its number among the parameters that share this memory
  Index start = 0;                 ///< its first entry in the exchange's numbering
  std::size_t offset = 0;          ///< its first entry in the flat memory
  std::size_t count = 0;           ///< its entries
  std::size_t number = 0;          ///< the parameter's number in the whole layout
  std::span<float> gradient = {};  ///< the caller's; empty if it is on a device
  bool lent = false;               ///< whether anything may be written into `gradient`
  std::span<float> mean = {};      ///< zeros, where the mean goes; empty: it replaces `gradient`
  /// The largest magnitude that the caller can use of the mean.
  float most = std::numeric_limits<float>::max();

  std::size_t size() const { return count; }
  std::size_t end() const { return start + count; }  ///< in the exchange's numbering
  /// Whether a mean may be too large for the caller; none comes near this (reducer.cpp).
  bool narrow() const { return most < 0x1p125f; }
};

/// How a memory with momentum moves on by itself between two steps; for those who foresee the next.
struct Drift {
  std::span<const float> velocity;  ///< flat over the model; empty: it does not move
  float lasts = 0;                  ///< share of the velocity that lasts
  float push = 0;                   ///< what a step's change adds to it
  enum class Sent { stop, go_on } sent = Sent::stop;

  /// What `place` will gain on top of what is left there, after a step that added `change`.
  float at(std::size_t place, float change) const {
    const float lasting = lasts * velocity[place], pushed = push * change;
    return lasts * (lasting + pushed);
  }
};

/// What this rank would send if the network were free: owed + gradient of one exchange. It is seen
/// and not stored, unless the gradients are lent: then a memory may take them in behind the last
/// look. Segments stand in parameter order, so nothing depends on the caller's bucket cut; when a
/// step is committed, those that nobody used are left out.
class CompensatedGradient {
 public:
  /// A memory that takes gradients in while they are still in the cache.
  class Intake {
   public:
    virtual ~Intake() = default;
    /// `count` entries of a segment, from its `first` on; on any thread, each entry once.
    virtual void take_in(const Segment& segment, std::size_t first, std::size_t count) = 0;
  };

  CompensatedGradient(std::span<const Segment> segments, std::span<const float> base, float scale,
                      const Drift& drift = {}, Threads& threads = Threads::none());
  /// On a device: its `open` vector.
  CompensatedGradient(std::span<const Segment> segments, Device& device, Device::Base base,
                      float scale);

  /// Null: all of it is in main memory. Otherwise `terms` and `gather` are not to be called.
  Device* device() const { return device_; }
  /// Makes a device open this vector; nothing otherwise.
  void open() const {
    if (device_ != nullptr) device_->open(segments_, on_device_, scale_);
  }

  std::span<const Segment> segments() const { return segments_; }
  Index size() const { return size_; }
  float scale() const { return scale_; }
  const Drift& drift() const { return drift_; }
  /// Threads for passes over it.
  Threads& threads() const { return threads_; }
  /// The gradient alone: nothing remembered was added.
  bool plain() const {
    return device_ != nullptr ? on_device_ == Device::Base::none : base_.empty();
  }

  /// The terms of one segment: base + scale * gradient.
  kernels::Terms terms(const Segment& segment) const;

  /// From here on `let_go` hands entries to `intake`.
  void let_go_to(Intake& intake) { intake_ = &intake; }
  /// Nobody looks at these entries again before `taken_in`.
  void let_go(const Segment& segment, std::size_t first, std::size_t count) const {
    if (intake_ != nullptr) intake_->take_in(segment, first, count);
  }
  /// All entries were let go of: the base is the sum.
  void taken_in() {
    intake_ = nullptr;
    is_taken_in_ = true;
  }
  bool is_taken_in() const { return is_taken_in_; }

  /// Calls body(segment, first, count) for all that lies in [begin, end) of the exchange: `count`
  /// entries of each segment, from its `first` on.
  template <class Body>
  void visit(std::size_t begin, std::size_t end, Body&& body) const {
    const auto ends_before = [&](const Segment& s) { return s.start + s.size() <= begin; };
    auto segment = std::ranges::partition_point(segments_, ends_before);
    for (; segment != segments_.end() && segment->start < end; ++segment) {
      const std::size_t start = segment->start, first = std::max(begin, start);
      const std::size_t last = std::min(end, start + segment->size());
      if (first < last) body(*segment, first - start, last - first);
    }
  }

  /// What a pass over all of it sees; on a device it must be open.
  kernels::Summary summarize() const;
  /// The same of the gradients alone. Not on a device, and not if they were taken in.
  kernels::Summary summarize_gradients() const;
  /// All of it; on a device it must be open.
  void evaluate(std::span<float> values) const;

  /// Replaces values.size() values with those at `indices` (ascending).
  void gather(std::span<const Index> indices, std::span<float> values) const;

 private:
  std::span<const Segment> segments_;
  std::span<const float> base_;  // flat over all parameters; empty counts as zeros
  float scale_;
  Drift drift_;
  Device* device_ = nullptr;
  Device::Base on_device_ = Device::Base::none;
  Threads& threads_;
  Index size_ = 0;
  Intake* intake_ = nullptr;
  bool is_taken_in_ = false;
};

}  // namespace topreduce
