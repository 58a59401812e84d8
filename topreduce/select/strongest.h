#pragma once

#include <array>
#include <vector>

#include "topreduce/compensated_gradient.h"

namespace topreduce::select {

/// The smallest threshold: everything but zero passes. Zeros are never worth sending.
inline constexpr float kNonZero = 1e-45f;

/// Exact top-k of a stream of entries, in one pass if the floor is a good guess.
///
/// Candidates above the floor are collected in index order. When too many came, only the `limit`
/// strongest stay and the floor rises to them: nothing that belongs to the result is ever dropped.
/// So it does not matter how many threads look, each keeping the strongest of its part.
class Strongest {
 public:
  /// Starts over: the `limit` strongest entries of magnitude >= `floor` are wanted.
  void begin(std::size_t limit, float floor);

  /// Looks at more entries; their indices, counted from `first`, follow all earlier ones. Adds to
  /// `summary`. Calls beside(start, block) with every block, counted from the start of `terms`,
  /// while it is in the cache, and on any of the threads.
  template <class Beside>
  void look(const kernels::Terms& terms, Index first, kernels::Summary& summary, Threads& threads,
            const Beside& beside);
  void look(const kernels::Terms& terms, Index first, kernels::Summary& summary, Threads& threads) {
    look(terms, first, summary, threads, [](std::size_t, const kernels::Terms&) {});
  }

  /// The same for all of `compensated`, which may be on a device.
  void look(const CompensatedGradient& compensated, kernels::Summary& summary);

  /// The same for a device in two parts: what will be asked of it, before its summary, and the
  /// look, if that is finite.
  void announce(Device& device);
  void look_on_device(Device& device);

  /// Candidates held now; at least min(limit, entries above the first floor).
  std::size_t size() const { return count_; }

  /// Appends the min(limit, size) strongest to `selected`, ties to the lower index, in index order.
  /// Returns the magnitude of the weakest of them, 0 if there is none.
  float finish(SparseVector& selected);

 private:
  static constexpr std::size_t kBlock = 1 << 14;  // entries per call of the kernel

  void look_at_block(const kernels::Terms& block, Index first, kernels::Summary& summary);
  void append(const SparseVector& later, std::size_t count);
  void make_space(std::size_t more);
  float cut();  // to the limit
  void cut_if_many();

  std::size_t limit_ = 0;
  float floor_ = 0;
  std::size_t count_ = 0;
  SparseVector candidates_, found_;
  std::vector<Strongest> helpers_;  // one for each thread: what it finds in its part
};

template <class Beside>
void Strongest::look(const kernels::Terms& terms, Index first, kernels::Summary& summary,
                     Threads& threads, const Beside& beside) {
  const Chunks chunks(terms.size());
  std::array<kernels::Summary, Chunks::kMost + 1> summaries;
  summaries[0] = summary;
  const auto look_at = [&](Strongest& finds, std::size_t from, std::size_t to) {
    for (std::size_t s = from; s < to; ++s) {
      const std::size_t end = chunks.begin(s + 1);
      for (std::size_t start = chunks.begin(s); start < end; start += kBlock) {
        const kernels::Terms block = terms.part(start, std::min(kBlock, end - start));
        finds.look_at_block(block, first + static_cast<Index>(start), summaries[s + 1]);
        beside(start, block);
      }
    }
  };
  const std::size_t count = chunks.count(), parts = std::min(threads.count(), count);
  if (parts > 1) {
    if (helpers_.size() < parts) helpers_.resize(parts);
    threads.for_each(parts, [&](std::size_t p) {
      helpers_[p].begin(limit_, floor_);
      look_at(helpers_[p], count * p / parts, count * (p + 1) / parts);
    });
    for (std::size_t p = 0; p < parts; ++p) append(helpers_[p].candidates_, helpers_[p].count_);
  } else {
    look_at(*this, 0, count);
  }
  summary = kernels::combine(std::span(summaries).first(count + 1));
}

}  // namespace topreduce::select
