#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "topreduce/compensated_gradient.h"
#include "topreduce/exchange/channel.h"
#include "topreduce/exchange/result.h"
#include "topreduce/exchange/task.h"
#include "topreduce/fingerprint.h"
#include "topreduce/pipeline.h"

namespace topreduce {

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
  double weight = 0;     // values that it sends
  bool settled = false;  // before the vote, so that it may have to be undone
  double gone = 0;       // energy that went with it

  void open(Pipeline::Place::Home where) {
    home = where;
    segments.clear();
    selected.clear();
    summary = {};
    result.clear();
    task = {};
    settled = false;
    gone = 0;
    sight.reset();
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
