#pragma once

#include <algorithm>
#include <limits>

namespace topreduce::tuning {

/// Bytes are not to blame for a wait that so many fewer of them hardly shorten.
constexpr double kClearlyFewer = 0.7, kHardlyShorter = 0.8;

/// What a step took. Merged over the ranks it is of the whole run: all ranks end a step together,
/// so the one that waited least computed longest, and waited for nothing but the exchange.
struct Measurement {
  /// Seconds from the start of the step until the last gradient was there; the longest.
  double computed = 0;
  /// Seconds from then until the means were there; the shortest.
  double waited = kUnknown;
  /// Seconds in which exchanges were under way; the shortest.
  double exchanging = kUnknown;
  /// Seconds of `computed` that exchanges could use: from the first one on; the longest.
  double overlap = 0;
  double bytes = 0;  ///< sent; the most
  /// Seconds of `computed` that a processor's work for it takes, by a first guess
  /// (processor_load.h); the most.
  double busy = 0;

  static constexpr double kUnknown = std::numeric_limits<float>::max();
  bool known() const { return waited < kUnknown && computed > 0; }
  /// The part of the step that was spent waiting.
  double share() const { return waited / (computed + waited); }

  void merge(const Measurement& other) {
    computed = std::max(computed, other.computed);
    waited = std::min(waited, other.waited);
    exchanging = std::min(exchanging, other.exchanging);
    overlap = std::max(overlap, other.overlap);
    bytes = std::max(bytes, other.bytes);
    busy = std::max(busy, other.busy);
  }
};

}  // namespace topreduce::tuning
