#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "topreduce/tuning/level.h"
#include "topreduce/tuning/measurement.h"

namespace topreduce::tuning {

/// A level, and the bytes that each rank is expected to send in a step with it.
struct Rung {
  Level level;
  double bytes = 0;
};

/// Finds the highest rung of a ladder on which a step waits no longer than it may, and stays there
/// until the network or the computing changes.
///
/// Each rung is tried for a few steps. Where to go next is told by the bytes: what is exchanged
/// while gradients are computed is free, and what exceeds that is waited for. Between a rung that
/// was quick enough and one that was not it follows a line, or halves, until they are nearly
/// neighbours.
/// Where cores are shared, the exchange also slows the computing down. How much of its work does so
/// is told by rungs with more and less of it; what it costs in all is limited as well.
/// Then it holds still. If steps wait a little too long, in the median of many, it goes down a
/// little; a new search begins only if they wait far too long, or if exchanges or the computing
/// take clearly another time than when it settled. Ever more rarely it looks if a higher rung will
/// do after all.
///
/// A training begins high: early steps are worth most. In its first steps more may be waited, and
/// ever less during the ramp; rungs follow that, without a search.
///
/// There is no clock in it, nor anything random: ranks that note the same numbers decide alike.
class TOPREDUCE_API DensityController {
 public:
  struct Options {
    double overhead = 0.05;          ///< the part of a step that may be waited
    double ramp_overhead = 0.05;     ///< the same in the first `warmup_steps` ...
    std::uint64_t warmup_steps = 0;  ///< ... from where it falls to `overhead` ...
    std::uint64_t ramp_steps = 0;    ///< ... over so many
    double most_bytes = 0;           ///< of a step; 0: any number
  };

  /// `ladder`: by ascending bytes, at least one rung; `start`: a place on it.
  DensityController(std::vector<Rung> ladder, std::size_t start, const Options& options);

  /// Of the next step.
  const Level& level() const { return ladder_[rung_].level; }
  /// What step number `step` took, made with level `used`.
  void note(std::uint64_t step, const Level& used, const Measurement& taken);

  bool settled() const { return state_ == State::hold || state_ == State::probe; }
  /// Goes on at the rung nearest to `level`; `settled`: without a search.
  void resume(const Level& level, bool settled);
  /// In words, why this level.
  std::string reason() const;

 private:
  enum class State { ramp, search, hold, probe };

  double overhead_at(std::uint64_t step) const;
  void follow_ramp();
  void search();
  const Measurement& seen_at(std::size_t rung) const;
  std::size_t between();
  void accept_the_end(const Measurement& lowest);
  void hold();
  void probe();
  bool exceeds(double factor, const Measurement& taken) const;
  double taken_by_bytes(const Measurement& taken) const;
  bool will_do(const Measurement& taken) const;
  void learn_processor();
  void sort_out();
  double slowed(const Measurement& taken) const;
  double few_bytes(const Measurement& taken) const;
  double by_processor(const Measurement& taken) const;
  double allowed_in_all(const Measurement& taken) const;
  std::size_t rung_sent(const Measurement& taken) const;
  void settle(std::size_t rung);
  void look_for(const Measurement* held);
  void move_to(std::size_t rung);
  void go_up(const Measurement& taken, double most);
  void go_down(const Measurement& taken, double least = 0);
  void remember(std::size_t rung, const Measurement& taken);
  double limited(double factor, const Measurement& taken) const;
  double factor_up(const Measurement& taken) const;
  double factor_down(const Measurement& taken) const;
  double cost(const Measurement& taken) const;
  bool fits(const Measurement& taken) const { return cost(taken) <= 1; }
  double share_of(const Measurement& taken) const;
  double allowed(const Measurement& taken) const;
  std::size_t rung_with(double bytes) const;
  Measurement median_of_last(std::size_t count) const;
  double scatter() const;

  std::vector<Rung> ladder_;
  Options options_;
  double few_ = 0;   // bytes of the ladder, whose work does not count
  double overhead_;  // that is allowed now
  State state_ = State::search;
  std::size_t rung_;
  std::size_t stride_ = 1;  // up, if the bytes tell no more
  std::optional<std::size_t> good_, bad_;
  std::optional<std::size_t> apart_;  // good and bad, when a line between them was last followed
  struct Visit {
    std::size_t rung;
    Measurement taken;
    double scatter;  // of the computing, seconds
  };
  std::vector<Visit> visits_;          // rungs that this search has tried
  double slowdown_ = 0;                // seconds of computing that a second of work costs
  double given_ = 0;                   // seconds of work that no lower rung would save
  int to_skip_ = 0;                    // steps before the stages have followed a change
  std::vector<Measurement> looks_;     // at this rung, oldest first
  double floor_ = 0;                   // seconds of waiting that fewer bytes do not shorten
  std::optional<Measurement> slower_;  // what was measured on the last rung that was too slow
  std::optional<Measurement> usual_;   // what was measured when it settled
  std::uint64_t held_ = 0, patience_;
  std::size_t held_rung_ = 0;  // before a probe
  bool fell_ = false;          // since steps took far too long
};

}  // namespace topreduce::tuning
