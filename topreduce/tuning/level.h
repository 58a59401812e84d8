#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "topreduce/api.h"
#include "topreduce/wire/value_format.h"

namespace topreduce::tuning {

/// What a step sends: a share of the entries, or all of them in some format.
struct Level {
  double density = 1;
  wire::ValueFormat values = wire::ValueFormat::fp32;  ///< of all entries, if it sends all

  bool everything() const { return density >= 1; }
  bool operator==(const Level&) const = default;
};

/// As users write it: "0.0313", or "int8" for all entries in that format.
TOPREDUCE_API std::string to_word(const Level& level);

/// The levels of a run, step by step, as text: "0.0313*12 0.0625 int8*100"; a word is a density or
/// a format, and the number of steps follows a '*'.
class TOPREDUCE_API Choices {
 public:
  /// Of such a text; commas or spaces between. A density of 1 sends everything in `whole`. Throws
  /// std::invalid_argument for what is no such text.
  static Choices parse(std::string_view text, wire::ValueFormat whole = wire::ValueFormat::fp32);

  void append(const Level& level);
  /// Of a step; after the last one that it stays. Not if empty.
  const Level& at(std::uint64_t step) const;
  bool empty() const { return runs_.empty(); }
  std::uint64_t steps() const;
  /// Drops all from this step on.
  void cut(std::uint64_t steps);
  std::string text() const;

 private:
  struct Run {
    Level level;
    std::uint64_t steps;
  };
  std::vector<Run> runs_;
};

}  // namespace topreduce::tuning
