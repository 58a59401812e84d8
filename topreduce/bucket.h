#pragma once

#include <algorithm>
#include <mutex>
#include <optional>
#include <vector>

#include "topreduce/compensated_gradient.h"
#include "topreduce/exchange/channel.h"
#include "topreduce/exchange/result.h"
#include "topreduce/exchange/task.h"
#include "topreduce/feedback/feedback.h"
#include "topreduce/fingerprint.h"
#include "topreduce/pipeline.h"

namespace topreduce {

/// Gradients that a memory took in before the vote, piece by piece, so that it can be undone.
class LentGradients final : public CompensatedGradient::Intake {
 public:
  void open(feedback::Feedback& memory, float scale) {
    memory_ = &memory;
    scale_ = scale;
    clear();
  }
  void take_in(const Segment& segment, std::size_t first, std::size_t count) override {
    Segment piece = segment;
    piece.offset += first;
    piece.count = count;
    piece.gradient = segment.gradient.subspan(first, count);
    {
      const std::lock_guard lock(mutex_);
      pieces_.push_back(piece);  // before it is taken in, since this may fail
    }
    const std::uint32_t largest = memory_->take_in(piece.offset, piece.gradient, scale_);
    const std::lock_guard lock(mutex_);
    seen_.largest_bits = std::max(seen_.largest_bits, largest);
  }
  void undo() noexcept {
    for (const Segment& piece : pieces_) memory_->unsettle(piece);
    clear();
  }
  void clear() noexcept {
    pieces_.clear();
    seen_ = {};
  }
  /// Of the gradients alone; without their energy.
  const kernels::Summary& seen() const { return seen_; }

 private:
  feedback::Feedback* memory_ = nullptr;
  float scale_ = 1;
  std::mutex mutex_;
  std::vector<Segment> pieces_;
  kernels::Summary seen_;
};

/// One exchange of a step: what it spans, what was chosen, what it brought. Reused from step to
/// step.
struct Bucket {
  Pipeline::Place::Home home = Pipeline::Place::Home::compressed;
  std::vector<Segment> segments;
  SparseVector selected;
  kernels::Summary summary;
  exchange::Result result;
  std::optional<CompensatedGradient> sight;  // what the exchange looks at, while it is under way
  exchange::Channel channel;
  exchange::Task task;
  double weight = 0;      // values that it sends
  LentGradients lent_in;  // taken into the memory, which may have to be undone
  bool taken_in = false;  // all of them
  bool settled = false;   // before the vote, so that it may have to be undone
  /// What sums were divided by and multiplied with that were handed out before the vote.
  struct Mean {
    int ranks = 0;
    float unit = 1;
    bool operator==(const Mean&) const = default;
  };
  std::optional<Mean> handed_out;
  double gone = 0;  // energy that went with it

  void open(Pipeline::Place::Home where) {
    home = where;
    segments.clear();
    selected.clear();
    summary = {};
    result.clear();
    task = {};
    gone = 0;
    sight.reset();
    keep();
  }

  /// What was taken in and settled is so for good.
  void keep() {
    lent_in.clear();
    taken_in = settled = false;
    handed_out.reset();
  }

  /// Puts the segments in parameter order, whatever order the caller had.
  void arrange() {
    std::ranges::sort(segments, {}, &Segment::parameter);
    Index start = 0;
    for (Segment& segment : segments) {
      segment.start = start;
      start += static_cast<Index>(segment.size());
    }
  }

  /// Whether a mean may be too large for a caller.
  bool narrow() const { return std::ranges::any_of(segments, &Segment::narrow); }

  /// Whether its gradients are the reducer's to write to.
  bool lent() const { return std::ranges::all_of(segments, &Segment::lent); }

  /// Whether its means have places of their own, where nobody looks before the end of the step.
  bool delivers() const {
    return std::ranges::all_of(segments, [](const Segment& segment) {
      return segment.mean.size() == segment.size() &&
             (segment.mean.empty() || segment.mean.data() != segment.gradient.data());
    });
  }

  /// The number of the exchange: its first parameter belongs to no other.
  std::uint32_t number() const {
    std::size_t least = segments.front().number;
    for (const Segment& segment : segments) least = std::min(least, segment.number);
    return static_cast<std::uint32_t>(least);
  }

  /// Tells apart what exchanges are about: equal sizes do not make equal parameters.
  std::uint64_t contents() const {
    Fingerprint numbers;
    for (const Segment& segment : segments) numbers.add(segment.number);
    return numbers.long_value();
  }
};

}  // namespace topreduce
