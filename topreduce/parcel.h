#pragma once

#include <algorithm>
#include <vector>

#include "topreduce/exchange/delivery.h"
#include "topreduce/fingerprint.h"
#include "topreduce/pending.h"
#include "topreduce/pipeline.h"

namespace topreduce {

/// One exchange of a step: what it spans, what was chosen, what it brought. Reused from step to
/// step.
struct Parcel {
  Pipeline::Place::Home home = Pipeline::Place::Home::compressed;
  std::vector<Segment> segments;
  SparseVector selected;
  kernels::Seen seen;
  exchange::Delivery delivery;

  void open(Pipeline::Place::Home where) {
    home = where;
    segments.clear();
    selected.clear();
    seen = {};
    delivery.clear();
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

  /// Tells apart what exchanges are about: equal sizes do not make equal parameters.
  std::uint32_t contents() const {
    Fingerprint numbers;
    for (const Segment& segment : segments) numbers.add(segment.number);
    return numbers.value();
  }
};

}  // namespace topreduce
