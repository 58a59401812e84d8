// ARC-Top-K: the rows that are largest *in the mean*, found with a small random sketch. The sketch
// is linear, so the sum of the ranks' sketches is the sketch of the sum: all ranks hold the same
// one, choose the same rows, and add those up like dense ones. No index travels.
//
//   rank 0:  rows A x V  ->  a |                    | s |   score each row:      rows 1, 4 of A |
//   rank 1:  rows B x V  ->  b | -- all-reduce -->  | s |   |s|^2, take the   -> rows 1, 4 of B |
//   rank 2:  rows C x V  ->  c |   a + b + c = s    | s |   largest: 1, 4        rows 1, 4 of C |
//            (m x n)(n x r)                             all-reduce of K rows  <-----------------+
//
// Rounds: 4 (two all-reduces). Values sent per rank: 2 (m r + K n) (P-1)/P. Drops nothing: rows not
// chosen stay owed. A fingerprint of the chosen rows stands in the header of every message of the
// second all-reduce, so ranks that do not agree find out.
//
// A row is a slice along the first dimension (what feeds one output), or `width` entries in a row.
// The authors' code makes rows of 2 t^2 entries of a convolution with t x t kernels; at t = 1 its
// sketch is larger than the tensor. Tensors of fewer than two dimensions, and those that a sketch
// would not shorten, go whole with the second all-reduce.
//
// ranked=tensor (the paper): in every tensor the best rows until they hold `density` of its
// entries, that is ceil(density * m) rows. ranked=model (ours): one ranking of all rows by their
// energy per entry. `random` is the share of them that is drawn instead, so that no row starves.
//
// Chen, Ma, Li, He, Dong, Yuan 2025, arXiv 2510.26709.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "topreduce/catalog.h"
#include "topreduce/exchange/all_reduce.h"
#include "topreduce/random.h"

namespace topreduce::exchange {
namespace {

enum class Stream { gaussian, signs };
enum class Ranked { tensor, model };

struct Options {
  std::size_t sketch;
  Stream stream;
  std::size_t width;
  Ranked ranked;
  double random;
};

// How one parameter is cut into rows.
struct Rows {
  std::size_t count = 0;              // none: it goes whole
  std::size_t width = 0;              // entries in a row; the last one may be shorter
  std::uint32_t first_direction = 0;  // its place in the stream of directions
  std::uint32_t first_draw = 0;       // and in that of random rows
};

// A row of the open exchange.
struct Row {
  Index start, size;
  double score;
  bool chosen;
};

// What one exchange keeps.
struct Work {
  Buffer<Row> rows;  // in order
  Buffer<float> sketches;
  // If a device ranks them:
  Buffer<Device::Ranked> parts;
  Buffer<Index> picks;
};

Rows cut_into_rows(const Parameter& parameter, const Options& options) {
  if (parameter.shape.size() < 2 || parameter.size == 0) return {};
  Rows rows;
  rows.width = options.width > 0 ? std::min(options.width, parameter.size)
                                 : parameter.size / parameter.shape[0];
  rows.count = (parameter.size + rows.width - 1) / rows.width;
  return rows.count * options.sketch < parameter.size ? rows : Rows();
}

class ArcTopK final : public Exchange {
 public:
  ArcTopK(const Options& options, const Layout& layout)
      : options_(options), model_(static_cast<double>(layout.size())) {
    std::size_t directions = 0, draws = 0;
    for (const Parameter& parameter : layout.parameters()) {
      Rows rows = cut_into_rows(parameter, options);
      rows.first_direction = static_cast<std::uint32_t>(directions);
      rows.first_draw = static_cast<std::uint32_t>(draws);
      directions += rows.width * options.sketch;
      draws += rows.count + 1;
      sketch_values_ += static_cast<double>(rows.count * options.sketch);
      parameters_.push_back(rows);
    }
  }

  Task run(const CompensatedGradient& compensated, const SparseVector&, const Budget& budget,
           Channel& channel, Result& result) override {
    const auto work = works_.take(channel.number());
    if (channel.adder() != nullptr && ranked_there(compensated)) {
      std::size_t rows = 0;
      {
        Stopwatch watch(channel.seconds(Stage::look));
        note_sketches(compensated, budget);
        rows = list_parts(compensated, budget, *work);
      }
      channel.reduce_best(rows * options_.sketch, work->parts, work->picks, result);
      co_return;
    }
    {
      Stopwatch watch(channel.seconds(Stage::look));
      sketch(compensated, budget, *work);
    }
    if (!work->rows.empty() && channel.adder() != nullptr) {
      channel.reduce_noted(work->sketches.size(), work->sketches);
    } else if (!work->rows.empty()) {
      co_await all_reduce(channel, channel.values(), work->sketches, {});
    }
    {
      Stopwatch watch(channel.seconds(Stage::choose));
      score(*work);
      choose(compensated, budget, work->rows);
      channel.adder() != nullptr ? list_runs(compensated, work->rows, result)
                                 : take(compensated, work->rows, result);
      channel.expect_same(fingerprint_of_choice(work->rows),
                          "the ranks hand over different parameters (all must add the same ones "
                          "in every step), or chose different rows");
    }
    // In even parts, as rows may lie close together; if values are rounded, in parts that do not
    // depend on the bucket cut, because who adds up a part owes its rounding.
    if (channel.adder() != nullptr) {
      std::size_t count = 0;
      for (const Device::Run& run : result.runs) count += run.size;
      channel.reduce_there(count, result);
      co_return;
    }
    SparseVector &sum = result.sum, &settled = result.settled;
    if (channel.rounds_values()) {
      co_await all_reduce(channel, compensated, sum.indices, sum.values, settled.values);
    } else {
      co_await all_reduce(channel, channel.values(), sum.values, settled.values);
    }
  }

  Cost cost(double k, double size, int ranks) const override {
    const double sketch = model_ > 0 ? sketch_values_ * size / model_ : 0;
    return {.rounds = sketch > 0 ? 4u : 2u,
            .values = 2 * (sketch + k) * (ranks - 1) / ranks,
            .indices = 0};
  }

  bool needs_whole_model() const override { return options_.ranked == Ranked::model; }

 private:
  // ---- first all-reduce: sketches ----

  void sketch(const CompensatedGradient& compensated, const Budget& budget, Work& work) {
    work.rows.clear();
    for (const Segment& segment : compensated.segments()) list_rows(segment, work.rows);
    make_room(work.sketches, work.rows.size() * options_.sketch);
    work.sketches.resize(work.rows.size() * options_.sketch);
    if (compensated.device() != nullptr) return note_sketches(compensated, budget);
    auto out = std::span(work.sketches);
    for (const Segment& segment : compensated.segments()) {
      const Rows& rows = parameters_[segment.parameter];
      if (rows.count == 0) continue;
      draw_directions(rows, budget);
      const kernels::Terms terms = compensated.terms(segment);
      const std::size_t parts = std::min(rows.count, Chunks(terms.size()).count());
      compensated.threads().for_each(parts, [&](std::size_t p) {
        for (std::size_t i = rows.count * p / parts; i < rows.count * (p + 1) / parts; ++i) {
          const std::size_t at = i * rows.width;
          const auto row = terms.part(at, std::min(rows.width, terms.size() - at));
          kernels::project(row, directions_.data(), rows.width,
                           out.subspan(i * options_.sketch, options_.sketch));
        }
      });
      out = out.subspan(rows.count * options_.sketch);
    }
  }

  void note_sketches(const CompensatedGradient& compensated, const Budget& budget) {
    for (const Segment& segment : compensated.segments()) {
      const Rows& rows = parameters_[segment.parameter];
      if (rows.count == 0) continue;
      draw_directions(rows, budget);
      compensated.device()->project(segment.start, segment.size(), rows.width, directions_);
    }
  }

  void list_rows(const Segment& segment, Buffer<Row>& all) const {
    const Rows& rows = parameters_[segment.parameter];
    for (std::size_t i = 0; i < rows.count; ++i) {
      const std::size_t at = i * rows.width;
      all.push_back({segment.start + static_cast<Index>(at),
                     static_cast<Index>(std::min(rows.width, segment.size() - at)), 0, false});
    }
  }

  // The same on all ranks, other ones for every step and every parameter.
  void draw_directions(const Rows& rows, const Budget& budget) {
    const RandomStream stream(budget.seed, budget.step, RandomStream::Purpose::sketch);
    make_room(directions_, rows.width * options_.sketch);
    directions_.resize(rows.width * options_.sketch);
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < directions_.size(); ++i) {
      const std::uint32_t place = rows.first_direction + static_cast<std::uint32_t>(i);
      if (options_.stream == Stream::gaussian) {
        directions_[i] = static_cast<float>(stream.normal(place));
        continue;
      }
      if (i == 0 || place % 64 == 0) bits = stream(place / 64);
      directions_[i] = (bits >> place % 64 & 1) != 0 ? 1.0f : -1.0f;
    }
  }

  // ---- the choice, from what all ranks hold alike ----

  // Energy per entry, but for a factor common to all rows.
  void score(Work& work) const {
    const float* sketch = work.sketches.data();
    for (Row& row : work.rows) {
      double energy = 0;
      for (std::size_t j = 0; j < options_.sketch; ++j, ++sketch) {
        energy += static_cast<double>(*sketch) * static_cast<double>(*sketch);
      }
      row.score = energy / row.size;
      // A sketch that overflowed: as large as can be, and never a NaN among what is sorted.
      if (!std::isfinite(row.score)) row.score = std::numeric_limits<double>::infinity();
    }
  }

  void choose(const CompensatedGradient& compensated, const Budget& budget, Buffer<Row>& all) {
    auto rest = std::span(all);
    if (options_.ranked == Ranked::model) return choose(rest, 0, budget);
    for (const Segment& segment : compensated.segments()) {
      const Rows& rows = parameters_[segment.parameter];
      choose(rest.first(rows.count), rows.first_draw, budget);
      rest = rest.subspan(rows.count);
    }
  }

  void choose(std::span<Row> rows, std::uint32_t first_draw, const Budget& budget) {
    if (rows.empty()) return;
    make_room(order_, rows.size());
    order_.resize(rows.size());
    std::iota(order_.begin(), order_.end(), Index{0});
    std::ranges::sort(order_, [&](Index a, Index b) {
      return rows[a].score != rows[b].score ? rows[a].score > rows[b].score : a < b;
    });
    double entries = 0;
    for (const Row& row : rows) entries += row.size;
    const auto size_at = [&](Index place) { return rows[order_[place]].size; };
    for (const Index place : pick(rows.size(), entries, size_at, first_draw, budget)) {
      rows[order_[place]].chosen = true;
    }
  }

  // Places in the order of energy: the fewest of the best rows that hold the budget, some of them
  // exchanged for random ones.
  template <class SizeAt>
  std::span<const Index> pick(std::size_t rows, double entries, const SizeAt& size_at,
                              std::uint32_t first_draw, const Budget& budget) {
    make_room(picks_, rows);
    picks_.resize(rows);
    std::iota(picks_.begin(), picks_.end(), Index{0});
    const double wanted = budget.density * entries * (1 - 1e-12);  // 0.07 * 100 is above 7
    std::size_t count = 0;
    double taken = 0;
    for (; count < rows && taken < wanted; ++count) taken += size_at(picks_[count]);
    if (options_.random == 0) return std::span(picks_).first(count);

    const RandomStream stream(budget.seed, budget.step, RandomStream::Purpose::rows);
    const double drawn = options_.random * static_cast<double>(count) + stream.unit(first_draw);
    for (auto n = static_cast<std::size_t>(drawn); n > 0; --n) taken -= size_at(picks_[--count]);
    for (; count < rows && taken < wanted; ++count) {
      const auto left = static_cast<std::uint32_t>(rows - count);
      const auto place = first_draw + 1 + static_cast<std::uint32_t>(count);
      std::swap(picks_[count], picks_[count + stream.below(left, place)]);
      taken += size_at(picks_[count]);
    }
    return std::span(picks_).first(count);
  }

  // ---- the same on a device ----

  // Where all rows that compete are of one size, it is known beforehand how many will be taken.
  bool ranked_there(const CompensatedGradient& compensated) const {
    bool any = false;
    for (const Segment& segment : compensated.segments()) {
      const Rows& rows = parameters_[segment.parameter];
      if (rows.count * rows.width != (rows.count > 0 ? segment.size() : 0)) return false;
      any |= rows.count > 0;
    }
    return any && options_.ranked == Ranked::tensor;
  }

  // Returns how many rows there are.
  std::size_t list_parts(const CompensatedGradient& compensated, const Budget& budget, Work& work) {
    std::size_t all = 0;
    work.parts.clear();
    work.picks.clear();
    for (const Segment& segment : compensated.segments()) {
      const Rows& rows = parameters_[segment.parameter];
      const auto size = static_cast<Index>(segment.size());
      if (rows.count == 0) {
        if (size > 0) work.parts.push_back({segment.start, 0, size, 0});
        continue;
      }
      const auto width = static_cast<Index>(rows.width);
      const auto size_at = [&](Index) { return width; };
      const auto picked = pick(rows.count, size, size_at, rows.first_draw, budget);
      work.picks.insert(work.picks.end(), picked.begin(), picked.end());
      work.parts.push_back({segment.start, static_cast<Index>(rows.count), width,
                            static_cast<Index>(picked.size())});
      all += rows.count;
    }
    return all;
  }

  static Fingerprint fingerprint_of_choice(std::span<const Row> rows) {
    Fingerprint starts;
    for (const Row& row : rows) {
      if (row.chosen) starts.add(row.start);
    }
    return starts;
  }

  // ---- second all-reduce: the rows ----

  // For a device, which takes them itself.
  void list_runs(const CompensatedGradient& compensated, std::span<const Row> all,
                 Result& result) const {
    const Row* row = all.data();
    for (const Segment& segment : compensated.segments()) {
      const std::size_t rows = parameters_[segment.parameter].count;
      if (rows == 0 && segment.size() > 0) {
        result.runs.push_back({segment.start, static_cast<Index>(segment.size())});
      }
      for (const Row* end = row + rows; row != end; ++row) {
        if (row->chosen) result.runs.push_back({row->start, row->size});
      }
    }
  }

  void take(const CompensatedGradient& compensated, std::span<const Row> all,
            Result& result) const {
    std::size_t count = 0;
    for (const Row& row : all) count += row.chosen ? row.size : 0;
    for (const Segment& segment : compensated.segments()) {
      if (parameters_[segment.parameter].count == 0) count += segment.size();
    }
    result.sum.resize(count);
    std::size_t at = 0;
    const auto add = [&](const kernels::Terms& terms, Index start) {
      const auto indices = std::span(result.sum.indices).subspan(at, terms.size());
      std::iota(indices.begin(), indices.end(), start);
      kernels::evaluate(terms, std::span(result.sum.values).subspan(at, terms.size()));
      at += terms.size();
    };
    const Row* row = all.data();
    for (const Segment& segment : compensated.segments()) {
      const kernels::Terms terms = compensated.terms(segment);
      const std::size_t rows = parameters_[segment.parameter].count;
      if (rows == 0) add(terms, segment.start);
      for (const Row* end = row + rows; row != end; ++row) {
        if (row->chosen) add(terms.part(row->start - segment.start, row->size), row->start);
      }
    }
    result.settled.assign(result.sum);
  }

  Options options_;
  double model_;              // entries of the model
  double sketch_values_ = 0;  // of all sketches together
  std::vector<Rows> parameters_;
  Pool<Work> works_;
  Buffer<float> directions_;
  Buffer<Index> order_, picks_;
};

}  // namespace

std::unique_ptr<Exchange> make_arc_topk(const Settings& settings, const Layout& layout) {
  const Options options{
      .sketch = settings.integer("sketch"),
      .stream = settings.text("stream") == "signs" ? Stream::signs : Stream::gaussian,
      .width = settings.integer("width"),
      .ranked = settings.text("ranked") == "model" ? Ranked::model : Ranked::tensor,
      .random = settings.number("random")};
  return std::make_unique<ArcTopK>(options, layout);
}

}  // namespace topreduce::exchange
