#pragma once

#include <cstdint>
#include <span>

#include "topreduce/api.h"
#include "topreduce/kernels/kernels.h"

namespace topreduce {

struct Segment;

/// The memory of an accelerator: gradients, and what is owed of them, lie there, and whatever
/// passes over all entries is done there. The core decides by thresholds and limits, so that only
/// chosen entries come into main memory.
///
/// Results are those of the core, bit for bit: products and sums of floats are rounded one by one.
/// What is owed changes in `commit` and `write` only, gradients in `commit` and `spoil`.
class TOPREDUCE_API Device {
 public:
  virtual ~Device() = default;

  /// Opens the vector x = base + scale * gradient of one exchange, its segments one after the other
  /// and counted from 0. All calls below, up to `commit`, are about the one that was opened last.
  enum class Base { none, owed };
  virtual void open(std::span<const Segment> segments, Base base, float scale) = 0;

  /// What will be asked of it: `strongest` with this floor and these limits, and, unless the
  /// stride is 0, `sample`. Lets a device bring counts, sample and summary in one go, and then all
  /// entries, if there are several questions.
  struct Questions {
    float floor = 0;
    std::span<const std::size_t> limits;
    std::span<const std::size_t> firsts;
    std::size_t stride = 0;
  };
  virtual void expect(const Questions& questions) = 0;

  /// What a pass over all of x sees. May be asked more than once.
  virtual kernels::Summary summarize() = 0;

  /// Replaces `selected` with the strongest entries of magnitude >= floor, ties to the lower index,
  /// in index order: of each segment as many as its limit says or, given one limit, of all of x.
  /// Only for a finite x.
  virtual void strongest(float floor, std::span<const std::size_t> limits,
                         SparseVector& selected) = 0;

  /// Of each segment every stride-th entry from firsts[segment] on, one after the other: x, and
  /// scale * gradient without the base.
  virtual void sample(std::span<const std::size_t> firsts, std::size_t stride,
                      Buffer<float>& values, Buffer<float>& gradients) = 0;

  /// All of x.
  virtual void evaluate(std::span<float> values) = 0;

  /// owed = x - settled, if x has a base; gradient = mean, zero where it lists nothing.
  virtual void commit(const SparseVector& settled, const SparseVector& mean) = 0;
  /// The same for all entries; an empty `settled` stands for all of x.
  virtual void commit_whole(std::span<const float> settled, std::span<const float> mean) = 0;
  /// By how much the energy of all x went down that were committed since this was last asked.
  virtual double settled_energy() = 0;

  // ---- reduce=native: sums over the ranks, where the gradients are ----

  /// Whether all ranks of a step can add up on their devices. If not, the calls below are not made.
  virtual bool adds_up() const { return false; }

  /// Cuts `size` entries of x, from `start` on, into rows of `width`, the last one perhaps shorter,
  /// and notes for each its products with the directions, which are `width` entries each.
  virtual void project(Index /*start*/, std::size_t /*size*/, std::size_t /*width*/,
                       std::span<const float> /*directions*/) {}
  /// Replaces `numbers` by their sums over the ranks, and fills `sums` with those of what was
  /// noted, in that order; that is forgotten.
  virtual void add_up_noted(std::span<float> /*numbers*/, std::span<float> /*sums*/) {}
  /// Some entries in a row.
  struct Run {
    Index start, size;
  };
  /// Replaces `numbers` as above; adds up x over the ranks where the runs are, or all of it if
  /// there are none, and keeps the sums under `key`, to which the calls below refer.
  virtual void add_up(std::span<float> /*numbers*/, std::span<const Run> /*runs*/,
                      std::uint32_t /*key*/) {}
  /// Rows of `width` entries, from `start` on; without any, `width` entries that go whole.
  struct Ranked {
    Index start, rows, width, picks;
  };
  /// Adds up what was noted of the rows of `parts`, orders those of each part by the energy of
  /// these sums, ties to the lower one, and takes as many as its `picks`, at the next places of
  /// `picks` in that order; then does as `add_up` with these rows and what goes whole. Energies are
  /// added up in fp64, one after the other, and divided by the width; what is not finite is
  /// infinite. Tells whether all ranks took the same rows.
  virtual bool add_up_best(std::span<float> /*numbers*/, std::span<const Ranked> /*parts*/,
                           std::span<const Index> /*picks*/, std::uint32_t /*key*/) {
    return true;
  }
  /// The largest magnitude of these sums; NaN if there is one.
  virtual float largest_sum(std::uint32_t /*key*/) { return 0; }
  /// Where these sums are, in ascending order, unless that is everywhere; the sums, and x at the
  /// same places.
  virtual void bring_sums(std::uint32_t /*key*/, std::span<Index> /*places*/,
                          std::span<float> /*sums*/, std::span<float> /*own*/) {}
  /// As `commit`: x was settled at their places, and their mean is sum / divisor * unit. They are
  /// forgotten.
  virtual void commit_sums(std::uint32_t /*key*/, float /*divisor*/, float /*unit*/) {}

  /// Every gradient of these segments becomes NaN.
  virtual void spoil(std::span<const Segment> segments) = 0;

  /// What is owed, flat over the remembered parameters. `write` also says how many entries it has;
  /// if it throws, what was owed is still there.
  virtual void read(std::span<float> owed) = 0;
  virtual void write(std::span<const float> owed) = 0;
};

}  // namespace topreduce
