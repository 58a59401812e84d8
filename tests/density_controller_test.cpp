// The search for the density, on simulated networks: it must find the highest level that hides,
// soon, stay there, and follow what changes.

#include "topreduce/tuning/density_controller.h"

#include <cmath>
#include <functional>
#include <random>

#include <gtest/gtest.h>

namespace topreduce::tuning {
namespace {

constexpr double kEntries = 10e6;
constexpr int kRanks = 4;
constexpr int kSettled = 30;  // steps that a search may take

/// Densities an eighth of an octave apart, then everything in 4, 8, 16 and 32 bits.
std::vector<Rung> ladder() {
  std::vector<Rung> rungs;
  for (int i = 80; i >= 14; --i) {
    const double density = std::exp2(-i / 8.0);
    const double bits = 4.25 + 1.5 - std::log2(density);
    rungs.push_back({{density, {}}, density * kEntries * (kRanks - 1) * bits / 8});
  }
  using wire::ValueFormat;
  const std::pair<ValueFormat, double> formats[] = {{ValueFormat::int4, 4.25},
                                                    {ValueFormat::int8, 8.25},
                                                    {ValueFormat::bf16, 16},
                                                    {ValueFormat::fp32, 32}};
  for (const auto& [format, bits] : formats) {
    rungs.push_back({{1, format}, 2 * kEntries * (kRanks - 1) / kRanks * bits / 8});
  }
  return rungs;
}

/// Hosts that compute and exchange at the same time, in buckets.
struct Hosts {
  double computed = 0.3;  // seconds, of which two thirds are the backward pass
  double rate = 12.5e6;   // bytes per second
  double latency = 1e-3;  // of a step's exchanges
  double end = 2e-3;      // seconds from the last message to the means
  double noise = 0;       // relative, of all times; one sided, with a long tail
  int buckets = 40;
  double work = 0, work_per_byte = 0;  // seconds of a processor
  double slowdown = 0;                 // seconds of computing that a second of work costs
  double seen = 1;                     // of an exchange, at least, by the rank that comes last
  double looked = 0;                   // seconds that exchanges take at least, by who looks rarely
  double hiccup = 0;                   // seconds, the mean of what else ends a step late

  Measurement step(double bytes, std::mt19937& random) const {
    std::exponential_distribution<double> tail(1);
    const auto disturbed = [&](double seconds) { return seconds * (1 + noise * tail(random)); };
    const double worked = work + work_per_byte * bytes;
    const double backward = disturbed(computed * 2 / 3) + slowdown * worked;
    const double overlap = backward * (buckets - 1) / buckets;
    const double busy = disturbed(bytes / rate + latency);
    const double exposed = std::max(busy - overlap, busy / buckets);
    const double some = busy * std::uniform_real_distribution<double>(seen, 1)(random);
    const double shortest = std::max(some, looked);
    const double waited = exposed + disturbed(end) + hiccup * tail(random);
    return {computed / 3 + backward, waited, shortest, overlap, bytes, worked};
  }
  /// How much longer a step takes, beside one without any exchange.
  double cost(double bytes) const {
    std::mt19937 random;
    const Measurement taken = step(bytes, random);
    return (taken.computed + taken.waited) / computed - 1;
  }
  /// The highest rung that waits no longer than it may.
  std::size_t best(const std::vector<Rung>& rungs, double overhead) const {
    Hosts quiet = *this;
    quiet.noise = 0;
    std::mt19937 random;
    std::size_t best = 0;
    for (std::size_t i = 0; i < rungs.size(); ++i) {
      if (quiet.step(rungs[i].bytes, random).share() <= overhead) best = i;
    }
    return best;
  }
};

/// A controller at work; all numbers are told one step late, as in a run.
class Training {
 public:
  explicit Training(const DensityController::Options& options = {}, unsigned seed = 1)
      : controller(ladder(), 40, options), random_(seed) {}

  void steps(const Hosts& hosts, int count) {
    for (int i = 0; i < count; ++i) {
      const Level level = controller.level();
      const auto rung = std::ranges::find(rungs, level, &Rung::level);
      visited.push_back(static_cast<std::size_t>(rung - rungs.begin()));
      const double wanted = rung->bytes;
      sent_ = follows < 1 && wanted < sent_ ? wanted / 2 : sent_ + follows * (wanted - sent_);
      const Measurement taken = hosts.step(sent_, random_);
      shares.push_back(taken.share());
      if (last_) controller.note(step_ - 1, last_->first, last_->second);
      last_ = {level, taken};
      ++step_;
    }
  }
  std::size_t rung() const { return visited.back(); }
  /// How often the rung changed in the last steps.
  int moves(std::size_t last) const {
    int count = 0;
    for (std::size_t i = visited.size() - last; i < visited.size(); ++i) {
      count += visited[i] != visited[i - 1] ? 1 : 0;
    }
    return count;
  }

  std::vector<Rung> rungs = ladder();
  DensityController controller;
  std::vector<std::size_t> visited;
  std::vector<double> shares;
  double follows = 1;  // of the way to the entries that are asked for, in a step

 private:
  double sent_ = 0;  // bytes
  std::mt19937 random_;
  std::uint64_t step_ = 0;
  std::optional<std::pair<Level, Measurement>> last_;
};

/// At most `below` rungs below the best, and not above.
void expect_best(const Training& run, const Hosts& hosts, double overhead, std::size_t below = 2) {
  const std::size_t best = hosts.best(run.rungs, overhead);
  EXPECT_LE(run.rung(), best);
  EXPECT_GE(run.rung() + below, best);
}

constexpr double kMbit = 1e6 / 8;

TEST(DensityController, FindsTheBestOnEveryNetwork) {
  for (const double mbit : {20., 50., 100., 200., 500., 1000., 2500., 10000., 100000.}) {
    for (const double computed : {0.05, 0.3, 2.0}) {
      SCOPED_TRACE(std::to_string(mbit) + " Mb/s, " + std::to_string(computed) + " s");
      const Hosts hosts{.computed = computed, .rate = mbit * kMbit};
      Training run;
      run.steps(hosts, kSettled + 5);
      EXPECT_TRUE(run.controller.settled());
      expect_best(run, hosts, 0.05);
      run.steps(hosts, 60);
      EXPECT_EQ(run.moves(60), 0) << "it holds still";
    }
  }
}

TEST(DensityController, WhereEverythingHidesItIsSentAsItIs) {
  Training run;
  run.steps({.rate = 10000 * kMbit}, kSettled);
  EXPECT_EQ(run.controller.level(), (Level{1, wire::ValueFormat::fp32}));
}

TEST(DensityController, FollowsARateThatChanges) {
  const Hosts fast{.rate = 1000 * kMbit}, slow{.rate = 100 * kMbit};
  Training run;
  run.steps(fast, 100);
  expect_best(run, fast, 0.05);
  run.steps(slow, kSettled);
  expect_best(run, slow, 0.05);
  run.steps(slow, 50);
  run.steps(fast, kSettled);
  expect_best(run, fast, 0.05);
}

// Exchanges of many small buckets are always under way, however quick each of them is.
TEST(DensityController, NoticesARateThatRisesByLooks) {
  const Hosts fast{.rate = 1000 * kMbit, .looked = 0.15};
  const Hosts slow{.rate = 100 * kMbit, .looked = 0.15};
  Training run;
  run.steps(fast, 100);
  expect_best(run, fast, 0.05);
  run.steps(slow, 50);
  expect_best(run, slow, 0.05);
  run.steps(fast, 35);
  expect_best(run, fast, 0.05, 4);
}

TEST(DensityController, FollowsABatchThatChanges) {
  const Hosts small{.computed = 0.15}, large{.computed = 0.6};
  Training run;
  run.steps(small, 50);
  run.steps(large, kSettled);
  expect_best(run, large, 0.05);
  run.steps(small, kSettled);
  expect_best(run, small, 0.05);
}

// What looks like a quicker network may be a hiccup: a leap would cost several steps' time.
TEST(DensityController, LooksForMoreByTwiceTheBytesAtFirst) {
  const Hosts slow{.rate = 100 * kMbit}, fast{.rate = 10000 * kMbit};
  Training run;
  run.steps(slow, 60);
  const double before = run.rungs[run.rung()].bytes;
  run.steps(fast, 30);
  std::vector<std::size_t> since(run.visited.begin() + 60, run.visited.end());
  const auto moved =
      std::ranges::find_if(since, [&](std::size_t rung) { return rung != since[0]; });
  ASSERT_NE(moved, since.end());
  EXPECT_GT(run.rungs[*moved].bytes, before);
  EXPECT_LE(run.rungs[*moved].bytes, 2 * before);
}

TEST(DensityController, HoldsStillForLong) {
  const Hosts hosts{.rate = 100 * kMbit};
  Training run;
  run.steps(hosts, 50);
  run.steps(hosts, 2000);
  EXPECT_LE(run.moves(2000), 14) << "now and then it looks at the next rung, ever more rarely";
  expect_best(run, hosts, 0.05);
}

TEST(DensityController, NoiseMovesItLittle) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    const Hosts hosts{.rate = 200 * kMbit, .noise = 0.05};
    Training run({}, seed);
    run.steps(hosts, 100);
    expect_best(run, hosts, 0.05, 8);
    run.steps(hosts, 300);
    EXPECT_LE(run.moves(300), 16);
    std::vector<double> shares(run.shares.end() - 300, run.shares.end());
    std::ranges::sort(shares);
    EXPECT_LE(shares[150], 0.08);
  }
}

TEST(DensityController, BeginsHighAndEndsTheRampWhereItStays) {
  for (const double mbit : {50., 100., 200., 1000., 10000.}) {
    SCOPED_TRACE(mbit);
    const Hosts hosts{.rate = mbit * kMbit};
    Training run({.overhead = 0.05, .ramp_overhead = 0.4, .warmup_steps = 10, .ramp_steps = 100});
    run.controller.resume({1, wire::ValueFormat::int4}, false);
    const std::size_t whole = run.rungs.size() - 4, free = hosts.best(run.rungs, 0.05);
    const auto expect_near = [&](double overhead) {
      const std::size_t most = std::max(whole, free);  // finer formats only where they are free
      const std::size_t best = std::min(hosts.best(run.rungs, overhead), most);
      EXPECT_LE(run.rung(), best);
      EXPECT_GE(run.rung() + 8, best);
    };
    run.steps(hosts, 20);
    EXPECT_EQ(run.visited[0], whole);
    expect_near(0.4);
    run.steps(hosts, 42);
    expect_near(0.16);
    EXPECT_FALSE(run.controller.settled());
    run.steps(hosts, 48 + kSettled);
    EXPECT_TRUE(run.controller.settled());
    expect_best(run, hosts, 0.05);
    int up = 0;
    for (std::size_t i = 32; i < 110; ++i) up += run.visited[i] > run.visited[i - 1] ? 1 : 0;
    EXPECT_LE(up, 2) << "down, and not up and down";
    double seconds = 0;
    for (std::size_t i = 0; i < 110; ++i) seconds += 1 / (1 - run.shares[i]);
    EXPECT_LE(seconds, 110 * 1.35) << "in steps without waiting";
  }
}

// Everything in 4 bits is work too: where cores are shared the first steps take longer by it.
TEST(DensityController, BeginsNoHigherThanSharedCoresAllow) {
  const Hosts hosts{.computed = 0.49,
                    .rate = 100 * kMbit,
                    .noise = 0.03,
                    .work = 9e-3,
                    .work_per_byte = 13e-9,
                    .slowdown = 4,
                    .seen = 0.3};
  for (unsigned seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    Training run({.ramp_overhead = 0.4, .warmup_steps = 10, .ramp_steps = 100}, seed);
    run.controller.resume({1, wire::ValueFormat::int4}, false);
    run.steps(hosts, 110);
    double cost = 0;
    for (const std::size_t rung : run.visited) cost += hosts.cost(run.rungs[rung].bytes) / 110;
    EXPECT_LE(cost, 0.45) << "of a step, on average; everything costs "
                          << hosts.cost(run.rungs[run.visited[0]].bytes);
    EXPECT_GE(cost, 0.15) << "early steps are worth something";
  }
}

// What even a first step shows is not waited for ten times.
TEST(DensityController, AVerySlowNetworkEndsTheWarmUp) {
  const Hosts hosts{.rate = 1 * kMbit};
  Training run({.overhead = 0.05, .ramp_overhead = 0.4, .warmup_steps = 10, .ramp_steps = 100});
  run.controller.resume({1, wire::ValueFormat::int4}, false);
  run.steps(hosts, 6);
  EXPECT_LT(run.rungs[run.rung()].bytes, run.rungs[run.visited[0]].bytes / 8);
}

// As a small model on busy hosts: single steps wait far longer than others, whatever they send.
TEST(DensityController, ASlowStepDoesNotEndTheRamp) {
  const Hosts quick{.computed = 0.05, .rate = 1000 * kMbit};
  Hosts hosts = quick;
  hosts.noise = 0.1;
  hosts.hiccup = 5e-3;
  for (unsigned seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    Training run({.ramp_overhead = 0.4, .warmup_steps = 10, .ramp_steps = 100}, seed);
    run.controller.resume({1, wire::ValueFormat::int4}, false);
    run.steps(hosts, 90);
    const double free = run.rungs[quick.best(run.rungs, 0.05)].bytes;
    for (std::size_t i = 0; i < 90; ++i) EXPECT_GE(run.rungs[run.visited[i]].bytes, free / 8) << i;
  }
}

TEST(DensityController, FollowsARateThatFallsInTheRamp) {
  for (const double mbit : {50., 200., 1000.}) {
    for (const double slower : {3., 10., 100.}) {
      SCOPED_TRACE(std::to_string(mbit) +
                   " Mb/s, then so many times slower: " + std::to_string(slower));
      const Hosts fast{.rate = mbit * kMbit, .noise = 0.05};
      Hosts slow = fast;
      slow.rate /= slower;
      Training run({.ramp_overhead = 0.4, .warmup_steps = 10, .ramp_steps = 100});
      run.controller.resume({1, wire::ValueFormat::int4}, false);
      run.steps(fast, 40);
      run.steps(slow, 20);
      EXPECT_LE(run.rung(), slow.best(run.rungs, 0.4));
    }
  }
}

TEST(DensityController, KeepsToTheBytes) {
  const Hosts hosts{.rate = 1000 * kMbit};
  Training run({.most_bytes = 1e6});
  run.steps(hosts, kSettled);
  EXPECT_TRUE(run.controller.settled());
  EXPECT_LE(run.rungs[run.rung()].bytes, 1e6);
  EXPECT_GE(run.rungs[run.rung()].bytes, 0.8e6);
}

// From below, in the first steps too; but for short looks at the next rung, 9 % higher.
TEST(DensityController, ExceedsTheBytesOnlyByLooks) {
  const Hosts hosts{.rate = 10000 * kMbit};
  Training run({.ramp_overhead = 0.4, .warmup_steps = 10, .ramp_steps = 50, .most_bytes = 1e6});
  run.controller.resume(run.rungs[0].level, false);
  run.steps(hosts, 400);
  int above = 0;
  for (const std::size_t rung : run.visited) {
    EXPECT_LE(run.rungs[rung].bytes, 1.1e6);
    above += run.rungs[rung].bytes > 1e6 ? 1 : 0;
  }
  EXPECT_LE(above, 20) << "of 400 steps";
  EXPECT_LE(run.rungs[run.rung()].bytes, 1e6);
  EXPECT_GE(run.rungs[run.rung()].bytes, 0.8e6);
}

// The end of a step takes longer than may be waited: it would be no quicker with less.
TEST(DensityController, DoesNotGiveUpEntriesForNothing) {
  const Hosts hosts{.rate = 1000 * kMbit, .end = 0.03};
  Training run;
  run.steps(hosts, 2 * kSettled);
  EXPECT_TRUE(run.controller.settled());
  EXPECT_GE(run.rung(), 40u) << "no lower than where it started";
  EXPECT_NE(run.controller.reason().find("fewer bytes would save no time"), std::string::npos)
      << run.controller.reason();
}

// Steps so short that their end alone takes longer than may be waited, from the first step on.
TEST(DensityController, DoesNotEndTheRampAtTheLowestForNothing) {
  const Hosts hosts{
      .computed = 7e-3, .rate = 20000 * kMbit, .latency = 1e-4, .end = 2e-3, .noise = 0.1};
  for (unsigned seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    Training run({.ramp_overhead = 0.4, .warmup_steps = 10, .ramp_steps = 100}, seed);
    run.controller.resume({1, wire::ValueFormat::int4}, false);
    run.steps(hosts, 160);
    EXPECT_TRUE(run.controller.settled());
    EXPECT_GE(run.rungs[run.rung()].level.density, 0.01) << run.controller.reason();
  }
}

// Cores that are shared: work beside the computing makes that longer.
TEST(DensityController, LimitsWhatItCostsInAll) {
  const Hosts hosts{.rate = 1000 * kMbit, .work = 5e-3, .work_per_byte = 5e-9, .slowdown = 1};
  Training run;
  run.steps(hosts, 2 * kSettled);
  EXPECT_TRUE(run.controller.settled());
  EXPECT_LE(hosts.cost(run.rungs[run.rung()].bytes), 0.08);
  EXPECT_GE(hosts.cost(run.rungs[run.rung() + 3].bytes), 0.06) << "no less than need be";
  EXPECT_NE(run.controller.reason().find("shares the processor"), std::string::npos);

  Hosts apart = hosts;
  apart.slowdown = 0;
  Training other;
  other.steps(apart, kSettled);
  expect_best(other, apart, 0.05);
  EXPECT_GT(other.rung(), run.rung());
}

// What even the least density takes counts too: the more that is, the less is left for bytes.
TEST(DensityController, LeavesToBytesWhatOtherWorkDoesNotTake) {
  const Hosts little{.rate = 1000 * kMbit, .work = 1e-3, .work_per_byte = 5e-9, .slowdown = 1};
  Hosts much = little;
  much.work = 8e-3;
  Training run, other;
  run.steps(little, 2 * kSettled);
  other.steps(much, 2 * kSettled);
  EXPECT_GT(run.rung(), other.rung());
  EXPECT_LE(little.cost(run.rungs[run.rung()].bytes), 0.08);
  EXPECT_LE(much.cost(other.rungs[other.rung()].bytes), 0.085);
}

// Just where work begins to count, and thresholds follow a density slowly.
TEST(DensityController, HoldsStillWhereWorkBeginsToCount) {
  const Hosts hosts{.rate = 1000 * kMbit, .work = 9e-3, .work_per_byte = 30e-9, .slowdown = 3};
  for (const double follows : {1.0, 0.6, 0.3}) {
    SCOPED_TRACE(follows);
    Training run;
    run.follows = follows;
    run.steps(hosts, 400);
    EXPECT_LE(run.moves(200), 8);
  }
}

// Every step begins to end late, whatever it sends, on shared cores.
TEST(DensityController, DoesNotFallBelowHalfAPercentForNothing) {
  for (const double noise : {0.0, 0.05}) {
    Hosts hosts{
        .rate = 100 * kMbit, .noise = noise, .work = 9e-3, .work_per_byte = 40e-9, .slowdown = 1.5};
    for (unsigned seed = 1; seed <= 10; ++seed) {
      SCOPED_TRACE(seed);
      Training run({}, seed);
      run.steps(hosts, 100);
      Hosts late = hosts;
      late.end = 0.022;
      run.steps(late, 600);
      EXPECT_GE(run.rungs[run.rung()].level.density, 0.003);
    }
  }
}

// What was tried first may have been cheaper than it is later on.
TEST(DensityController, GoesDownWhereWorkGrows) {
  Hosts hosts{.rate = 1000 * kMbit, .work = 5e-3, .work_per_byte = 5e-9, .slowdown = 1};
  Training run;
  run.steps(hosts, 2 * kSettled);
  const std::size_t before = run.rung();
  hosts.work_per_byte *= 3;
  EXPECT_GT(hosts.cost(run.rungs[before].bytes), 0.1);
  run.steps(hosts, 2 * kSettled);
  EXPECT_LT(run.rung(), before);
  EXPECT_LE(hosts.cost(run.rungs[run.rung()].bytes), 0.09);
}

// As four ranks on two cores are: every number scatters.
TEST(DensityController, HoldsStillWhereTimesScatter) {
  const Hosts hosts{
      .noise = 0.05, .work = 9e-3, .work_per_byte = 8e-9, .slowdown = 0.8, .seen = 0.1};
  Hosts quiet = hosts;
  quiet.noise = 0;
  constexpr unsigned kSeeds = 20;
  double mean = 0;
  for (unsigned seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    Training run({}, seed);
    run.steps(hosts, 200);
    std::vector<std::size_t> last(run.visited.end() - 100, run.visited.end());
    std::ranges::sort(last);
    const double cost = quiet.cost(run.rungs[last[50]].bytes);
    EXPECT_LE(cost, 0.08) << "a lowest density costs 0.03";
    EXPECT_GE(cost, 0.04) << "no less than need be";
    EXPECT_LE(run.moves(100), 8) << "it tries others now and then";
    mean += cost / kSeeds;
  }
  EXPECT_LE(mean, 0.06);
}

TEST(DensityController, SettlesSoonWhereTimesScatter) {
  const Hosts hosts{.rate = 1000 * kMbit,
                    .noise = 0.04,
                    .work = 8e-3,
                    .work_per_byte = 7e-9,
                    .slowdown = 1.5,
                    .seen = 0.1};
  constexpr unsigned kSeeds = 20;
  double mean = 0;
  for (unsigned seed = 1; seed <= kSeeds; ++seed) {
    Training run({}, seed);
    int steps = 0;
    for (; steps < 100 && !run.controller.settled(); ++steps) run.steps(hosts, 1);
    mean += static_cast<double>(steps) / kSeeds;
  }
  EXPECT_LE(mean, 24);
}

// As a small model on busy hosts: a step is short, and single ones wait far longer than others.
TEST(DensityController, DoesNotWanderWhereSingleStepsWaitLong) {
  const Hosts hosts{.computed = 0.075,
                    .rate = 200 * kMbit,
                    .end = 1e-3,
                    .noise = 0.05,
                    .work = 2e-3,
                    .work_per_byte = 8e-9,
                    .slowdown = 0.8,
                    .hiccup = 1.2e-3};
  for (unsigned seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    Training run({}, seed);
    run.steps(hosts, 600);
    std::vector<std::size_t> last(run.visited.end() - 500, run.visited.end());
    EXPECT_LE(run.moves(500), 16);
    std::ranges::sort(last);
    EXPECT_LE(last[450] - last[50], 8u) << "an octave";
  }
}

// The machine has become busy: every step ends late, whatever it sends.
TEST(DensityController, DoesNotGoDownStepByStepForNothing) {
  Hosts hosts{.computed = 0.08, .rate = 400 * kMbit, .end = 1e-3, .noise = 0.05, .hiccup = 1e-3};
  for (unsigned seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    Training run({}, seed);
    run.steps(hosts, 100);
    const std::size_t before = run.rung();
    Hosts busy = hosts;
    busy.end = 5.5e-3;
    run.steps(busy, 600);
    std::vector<std::size_t> last(run.visited.end() - 200, run.visited.end());
    std::ranges::sort(last);
    EXPECT_GE(last[100] + 12, before) << "an octave and a half";
  }
}

TEST(DensityController, ComesBackAfterSomeSlowSteps) {
  const Hosts hosts{.rate = 100 * kMbit};
  Hosts slower = hosts;
  slower.end = 0.022;
  Training run;
  run.steps(hosts, 60);
  const std::size_t before = run.rung();
  run.steps(slower, 12);
  EXPECT_LT(run.rung(), before);
  EXPECT_GE(run.rung() + 5, before) << "a little less, and no search";
  run.steps(hosts, 70);
  EXPECT_GE(run.rung() + 1, before);
  EXPECT_LE(run.rung(), before + 1);
}

// Even the least costs too much: then what is beyond that is limited.
TEST(DensityController, WhatCannotBeSavedIsGiven) {
  const Hosts hosts{.rate = 1000 * kMbit, .work = 30e-3, .work_per_byte = 16e-9, .slowdown = 1};
  Training run;
  run.steps(hosts, 2 * kSettled);
  EXPECT_TRUE(run.controller.settled());
  const double least = hosts.cost(run.rungs[0].bytes);
  EXPECT_LE(hosts.cost(run.rungs[run.rung()].bytes), least + 0.03);
  EXPECT_GE(hosts.cost(run.rungs[run.rung() + 4].bytes), least + 0.02) << "no less than need be";
}

// With less than half a percent a training needs clearly more steps, which no quicker step makes up
// for: so the work for so few bytes does not count. What they are waited for does.
TEST(DensityController, WorkDoesNotLowerItBelowHalfAPercent) {
  for (const double noise : {0.0, 0.05}) {
    const Hosts hosts{.rate = 100 * kMbit,
                      .noise = noise,
                      .work = 9e-3,
                      .work_per_byte = 30e-9,
                      .slowdown = 3,
                      .seen = noise > 0 ? 0.1 : 1};
    EXPECT_GT(hosts.cost(251e3), hosts.cost(0) + 0.05) << "half a percent, more than is allowed";
    for (unsigned seed = 1; seed <= 20; ++seed) {
      SCOPED_TRACE(seed);
      Training run({}, seed);
      run.steps(hosts, 200);
      std::vector<std::size_t> last(run.visited.end() - 100, run.visited.end());
      std::ranges::sort(last);
      const double density = run.rungs[last[50]].level.density;
      EXPECT_GE(density, 0.0045);
      EXPECT_LE(density, 0.009);
    }
  }
  const Hosts slow{.rate = 5 * kMbit, .work = 9e-3, .work_per_byte = 30e-9, .slowdown = 3};
  Training run;
  run.steps(slow, 100);
  EXPECT_LT(run.rungs[run.rung()].level.density, 0.003);
}

// Where fewer are asked for a threshold is too high at first: half of them, and more in each step.
TEST(DensityController, DoesNotWaitForAThresholdThatFollows) {
  for (const double mbit : {50., 100., 1000.}) {
    SCOPED_TRACE(mbit);
    const Hosts hosts{.rate = mbit * kMbit};
    Training run;
    run.follows = 0.3;
    run.steps(hosts, 2 * kSettled);
    EXPECT_TRUE(run.controller.settled());
    const std::size_t best = hosts.best(run.rungs, 0.05);
    EXPECT_LE(run.rung(), best + 1);
    EXPECT_GE(run.rung() + 3, best);
  }
}

TEST(DensityController, GoesOnWhereItWas) {
  const Hosts hosts{.rate = 100 * kMbit};
  Training run;
  run.steps(hosts, 50);
  DensityController other(ladder(), 40, {});
  other.resume(run.controller.level(), run.controller.settled());
  EXPECT_EQ(other.level(), run.controller.level());
  EXPECT_TRUE(other.settled());
}

TEST(Choices, AreText) {
  Choices choices;
  for (int i = 0; i < 12; ++i) choices.append({0.0313, {}});
  choices.append({0.0625, {}});
  for (int i = 0; i < 3; ++i) choices.append({1, wire::ValueFormat::int8});
  EXPECT_EQ(choices.text(), "0.0313*12 0.0625 int8*3");
  const Choices read = Choices::parse("[0.0313*12, 0.0625, 'int8*3']");
  EXPECT_EQ(read.text(), choices.text());
  EXPECT_EQ(read.steps(), 16u);
  EXPECT_EQ(read.at(11).density, 0.0313);
  EXPECT_EQ(read.at(12).density, 0.0625);
  EXPECT_EQ(read.at(1000), (Level{1, wire::ValueFormat::int8}));
  choices.cut(13);
  EXPECT_EQ(choices.text(), "0.0313*12 0.0625");
  choices.cut(5);
  EXPECT_EQ(choices.text(), "0.0313*5");
  for (const char* wrong : {"0", "2", "int9", "0.1*", "0.1*0", "0.1*-1", "*3", "0.1x"}) {
    EXPECT_THROW(Choices::parse(wrong), std::invalid_argument) << wrong;
  }
}

}  // namespace
}  // namespace topreduce::tuning
