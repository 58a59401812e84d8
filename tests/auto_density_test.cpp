// density=auto in the Reducer: all ranks choose alike from what the slowest measured, what was
// chosen can be repeated bit for bit, and a run goes on where it was.

#include <chrono>
#include <cmath>
#include <set>
#include <thread>

#include "cluster.h"
#include "expect_error.h"
#include "topreduce/errors.h"
#include "topreduce/tuning/level.h"
#include "topreduce/tuning/processor_load.h"
#include "topreduce/wire/payload.h"

namespace topreduce::laws {
namespace {

constexpr int kSteps = 40;

/// Seconds that a rank tells: computing takes so many that what exchanges really take is nothing,
/// and each byte above `free_bytes` is waited for.
struct Clock {
  double free_bytes = 2000;
  double seconds_per_byte = 1;

  void tell(Reducer& reducer, int rank) const {
    const auto bytes = static_cast<double>(reducer.stats().bytes_sent);
    const double network = std::max(0.0, bytes - free_bytes) * seconds_per_byte;
    reducer.timed(1000.0 - rank, network + 10 + rank);  // the others wait for rank 0
  }
};

Layout a_model() {
  return Layout({{"embedding", {100, 32}}, {"weight", {64, 32}}, {"bias", {64}}});
}

Floats a_gradient(const Layout& layout, int rank, std::uint64_t step) {
  std::mt19937 random(static_cast<unsigned>(1000 * step) + static_cast<unsigned>(rank));
  std::normal_distribution<float> normal;
  Floats gradient(layout.size());
  for (float& x : gradient) x = normal(random) * std::abs(normal(random));
  return gradient;
}

struct Seen {
  std::vector<std::string> levels;  // step by step
  std::vector<Floats> means;
  Floats owed;
  std::string choices, exchange, reason;
};

/// Runs `steps` steps; every rank must see the same. `before`: called for each rank's reducer.
Seen run(int ranks, const std::string& spec, int steps, const Clock& clock,
         const std::function<void(Reducer&, int)>& before = {}) {
  std::vector<Seen> seen(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](Communicator& comm) {
    Seen& mine = seen[comm::at(comm.rank())];
    Reducer reducer(a_model(), spec);
    if (before) before(reducer, comm.rank());
    reducer.agree(comm);
    for (int s = 0; s < steps; ++s) {
      mine.levels.push_back(reducer.level());
      Floats gradient = a_gradient(reducer.layout(), comm.rank(), reducer.step());
      reducer.average(comm, gradient);
      clock.tell(reducer, comm.rank());
      mine.means.push_back(gradient);
    }
    mine.owed.assign(reducer.owed().begin(), reducer.owed().end());
    mine.choices = reducer.choices();
    mine.exchange = parse_spec(reducer.spec().settings.at("exchange")).name;
    mine.reason = reducer.reason();
  });
  for (const Seen& other : seen) {
    EXPECT_EQ(other.levels, seen[0].levels);
    EXPECT_EQ(other.means, seen[0].means);
    EXPECT_EQ(other.choices, seen[0].choices);
  }
  return seen[0];
}

double as_density(const std::string& level) {
  return std::isdigit(static_cast<unsigned char>(level[0])) != 0 ? std::stod(level) : 1;
}

TEST(AutoDensity, AllRanksChooseAlike) {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    SCOPED_TRACE(ranks);
    const Seen seen = run(ranks, "auto", 2 * kSteps, {.free_bytes = 1000.0 * ranks});
    EXPECT_EQ(seen.exchange, "gather");
    if (ranks == 1) {
      EXPECT_EQ(seen.levels.back(), "fp32");
      continue;
    }
    EXPECT_NE(seen.levels.back(), seen.levels.front());
    EXPECT_NE(seen.reason.find("settled"), std::string::npos) << seen.reason;
  }
}

TEST(AutoDensity, ManyRanksTakeOkTopk) {
  EXPECT_EQ(run(9, "auto", 3, {}).exchange, "ok_topk");
  EXPECT_EQ(run(9, "auto:exchange=gather", 1, {}).exchange, "gather");
}

TEST(AutoDensity, WhatNobodyWaitsForIsSentAsItIs) {
  const Clock free{.free_bytes = 1e12};
  EXPECT_EQ(run(3, "auto", kSteps, free).levels.back(), "fp32");
  EXPECT_EQ(run(3, "auto:values=int8", kSteps, free).levels.back(), "int8");
  EXPECT_EQ(run(3, "topk:density=auto", kSteps, free).levels.back(), "int4");
  EXPECT_LE(as_density(run(3, "auto:max_density=0.2", kSteps, free).levels.back()), 0.2);
  EXPECT_GE(as_density(run(3, "auto:max_density=0.2", kSteps, free).levels.back()), 0.18);
}

TEST(AutoDensity, IsForEveryMethodWithADensity) {
  for (const Method& method : methods()) {
    SCOPED_TRACE(method.name);
    const Seen seen = run(3, std::string(method.name) + ":density=auto", 12, {});
    const bool sparse = std::ranges::any_of(
        seen.levels, [](const std::string& level) { return as_density(level) < 1; });
    EXPECT_EQ(sparse, method.name != "dense");
    EXPECT_EQ(std::set(seen.levels.begin(), seen.levels.end()).size() > 1, sparse);
  }
}

/// The density with which entries in `format` take as many bytes as `density` in 4 bits.
double with_equal_bytes(wire::ValueFormat format, double density) {
  const auto bits = [](wire::ValueFormat of, double share) {
    return share * (wire::bits_per_value(of) + wire::bits_per_index(share));
  };
  double low = density / 8, high = std::min(1.0, 8 * density);
  for (int i = 0; i < 40; ++i) {
    const double middle = (low + high) / 2;
    (bits(format, middle) < bits(wire::ValueFormat::int4, density) ? low : high) = middle;
  }
  return low;
}

// Why entries travel in 4 bits: with equal bytes finer formats settle less, and owe more.
TEST(AutoDensity, FourBitsKeepMoreEnergyThanFinerFormats) {
  const Layout layout({{"weight", {20'000}}});
  struct EnergyKept {
    double energy, owed;
  };
  const auto keep = [&](wire::ValueFormat format, double density) {
    std::vector<EnergyKept> kept(2);
    run_ranks(2, [&](Communicator& comm) {
      Reducer reducer(layout, "topk:granularity=model,values=" +
                                  tuning::to_word({.density = 1, .values = format}) +
                                  ",density=" + std::to_string(density));
      EnergyKept& mine = kept[comm::at(comm.rank())];
      for (int s = 0; s < 12; ++s) {
        Floats gradient = heavy_tailed(comm.rank(), s, layout);
        const StepStats& stats = reducer.average(comm, gradient);
        mine = {stats.kept_energy, stats.owed_norm};
      }
    });
    return kept[0];
  };
  for (const double density : {0.003, 0.03, 0.1, 0.2}) {
    const EnergyKept chosen = keep(wire::ValueFormat::int4, density);
    using wire::ValueFormat;
    for (const auto other : {ValueFormat::bf16, ValueFormat::int8}) {
      SCOPED_TRACE(tuning::to_word({.density = 1, .values = other}) + " instead of " +
                   std::to_string(density));
      const EnergyKept kept = keep(other, with_equal_bytes(other, density));
      EXPECT_GT(chosen.energy, kept.energy);
      EXPECT_LT(chosen.owed, kept.owed);
    }
  }
}

TEST(AutoDensity, KeepsToItsLimits) {
  const Clock slow{.free_bytes = 0, .seconds_per_byte = 1000};
  const Seen least = run(3, "auto:min_density=0.02", kSteps, slow);
  EXPECT_GE(as_density(least.levels.back()), 0.02);
  EXPECT_LT(as_density(least.levels.back()), 0.023);
  const Clock free{.free_bytes = 1e12};
  run(3, "auto:budget_bytes=2500", 2 * kSteps, free,
      [](Reducer& reducer, int) { EXPECT_EQ(reducer.spec().settings.at("budget_bytes"), "2500"); });
  run_ranks(3, [&](Communicator& comm) {
    Reducer reducer(a_model(), "auto:budget_bytes=2500");
    std::uint64_t last = 0;
    for (int s = 0; s < 2 * kSteps; ++s) {
      Floats gradient = a_gradient(reducer.layout(), comm.rank(), reducer.step());
      reducer.average(comm, gradient);
      free.tell(reducer, comm.rank());
      last = reducer.stats().bytes_sent;
    }
    EXPECT_LE(last, 2500 * 1.1);
    EXPECT_GE(last, 2500 * 0.6);
  });
}

// A rank that computes longest waits least, and what it waits is what counts; among equal ranks
// the one with the slow link makes all wait.
TEST(AutoDensity, TheSlowestCounts) {
  const auto with_slow_rank = [](int slow) {
    std::string level;
    run_ranks(3, [&](Communicator& comm) {
      Reducer reducer(a_model(), "auto");
      for (int s = 0; s < kSteps; ++s) {
        Floats gradient = a_gradient(reducer.layout(), comm.rank(), reducer.step());
        reducer.average(comm, gradient);
        const auto network = 0.01 * static_cast<double>(reducer.stats().bytes_sent);
        // All end together: who computes for longer waits for less.
        const double computed = comm.rank() == slow ? 1000.0 : 1.0;
        reducer.timed(computed, std::max(slow < 0 ? 1.0 : 1000.0, 1 + network) + 0.01 - computed);
      }
      if (comm.rank() == 0) level = reducer.level();
    });
    return level;
  };
  EXPECT_EQ(with_slow_rank(1), "fp32") << "others wait for rank 1, not for the network";
  EXPECT_LT(as_density(with_slow_rank(-1)), 0.002) << "all wait for the network";
}

TEST(AutoDensity, ARunCanBeRepeated) {
  const Seen first = run(3, "auto:warmup_steps=2,ramp_steps=10", kSteps, {});
  EXPECT_EQ(tuning::Choices::parse(first.choices).steps(), std::uint64_t{kSteps});
  const Clock other{.free_bytes = 1e12};
  const Seen again = run(3, "auto:density=(" + first.choices + ")", kSteps, other);
  EXPECT_EQ(again.levels, first.levels);
  EXPECT_EQ(again.means, first.means);
  EXPECT_EQ(again.owed, first.owed);
  EXPECT_EQ(again.choices, first.choices);
  EXPECT_EQ(again.reason, "as another run chose");
}

/// The texts of a state.
class Texts final : public StateVisitor {
 public:
  explicit Texts(Purpose purpose, std::map<std::string, std::string> values = {})
      : texts(std::move(values)), purpose_(purpose) {}
  Purpose purpose() const override { return purpose_; }
  void entries(std::string_view, std::span<float>) override {}
  void parameters(std::string_view, std::span<double>) override {}
  void number(std::string_view name, double& value) override {
    if (purpose_ == Purpose::save)
      numbers[std::string(name)] = value;
    else
      value = numbers.at(std::string(name));
  }
  void text(std::string_view name, std::string& text) override {
    if (purpose_ == Purpose::save)
      texts[std::string(name)] = text;
    else
      text = texts[std::string(name)];
  }
  std::map<std::string, double> numbers;
  std::map<std::string, std::string> texts;

 private:
  Purpose purpose_;
};

TEST(AutoDensity, GoesOnWhereItWas) {
  run_ranks(3, [&](Communicator& comm) {
    const auto advance = [&](Reducer& reducer, int steps) {
      for (int s = 0; s < steps; ++s) {
        Floats gradient = a_gradient(reducer.layout(), comm.rank(), reducer.step());
        reducer.average(comm, gradient);
        Clock().tell(reducer, comm.rank());
      }
    };
    Reducer reducer(a_model(), "auto");
    advance(reducer, 2 * kSteps);
    Texts saved(StateVisitor::Purpose::save);
    reducer.visit(saved);
    Texts loaded(StateVisitor::Purpose::load, saved.texts);
    loaded.numbers = saved.numbers;
    Reducer other(a_model(), "auto");
    other.visit(loaded);
    EXPECT_EQ(other.level(), reducer.level());
    EXPECT_EQ(other.choices(), reducer.choices());
    advance(other, 5);
    EXPECT_EQ(other.level(), reducer.level()) << "and stays there";
    EXPECT_EQ(tuning::Choices::parse(other.choices()).steps(), std::uint64_t{2 * kSteps + 5});

    // A state without a text: the search begins anew.
    Texts old(StateVisitor::Purpose::load);
    old.numbers = saved.numbers;
    Reducer third(a_model(), "auto");
    EXPECT_NO_THROW(third.visit(old));
    Texts damaged(StateVisitor::Purpose::check, {{"choices", "0.1 nonsense"}});
    damaged.numbers = saved.numbers;
    expect_error([&] { third.visit(damaged); }, {"nonsense"});
  });
}

TEST(AutoDensity, ChangesWithTheSettings) {
  run_ranks(2, [&](Communicator& comm) {
    Reducer reducer(a_model(), "topk");
    const auto step = [&] {
      Floats gradient = a_gradient(reducer.layout(), comm.rank(), reducer.step());
      reducer.average(comm, gradient);
      Clock().tell(reducer, comm.rank());
    };
    EXPECT_EQ(reducer.level(), "0.01") << "alone, the Reducer takes what is fixed";
    step();
    reducer.configure({"", {{"density", "auto"}}});
    for (int s = 0; s < kSteps; ++s) step();
    const std::string found = reducer.level();
    EXPECT_NE(found, "0.01");
    reducer.configure({"", {{"bucket_cap_mb", "2"}}});
    step();
    EXPECT_EQ(reducer.level(), found);
    reducer.configure({"", {{"density", "0.5"}}});
    EXPECT_EQ(reducer.level(), "0.5");
    step();
    EXPECT_EQ(reducer.choices().substr(0, 5), "0.01 ");
    EXPECT_EQ(reducer.choices().substr(reducer.choices().size() - 4), " 0.5");
  });
}

TEST(AutoDensity, MistakesAreNamed) {
  const auto refused = [](const char* spec, const std::vector<std::string>& words) {
    expect_error([&] { Reducer reducer(a_model(), spec); }, words);
  };
  refused("topk:density=automatic", {"density=automatic", "(0, 1], auto, or a list"});
  refused("topk:density=(0.1 2)", {"density=0.1 2", "(0, 1]"});
  refused("topk:min_density=0.5,max_density=0.1", {"min_density=0.5", "max_density=0.1"});
  Reducer reducer(a_model(), "auto");
  expect_error([&] { reducer.timed(-1, 0); }, {"timed", "positive"});
  EXPECT_EQ(Reducer(a_model(), "arc_topk").level(), "0.2");
}

TEST(ProcessorLoad, ReadsWhatLinuxCounts) {
  using tuning::ProcessorTimes;
  const auto times = ProcessorTimes::parse("cpu  10 20 30 400 50 6 7 8 90 91\ncpu0 1 2 3 4\n");
  ASSERT_TRUE(times);
  EXPECT_EQ(times->busy, 10u + 20 + 30 + 6 + 7 + 8);  // guests, the last two, are in the first two
  EXPECT_EQ(times->idle, 400u + 50);
  const auto old = ProcessorTimes::parse("cpu 1 2 3 4\ncpu0 9 9 9 9");
  ASSERT_TRUE(old);
  EXPECT_EQ(old->busy, 6u);
  EXPECT_EQ(old->idle, 4u);
  for (const char* text : {"", "cpu", "cpu ", "cpu  1 2 3", "cpu0 1 2 3 4", "cpu  1 2 x 4"}) {
    EXPECT_FALSE(ProcessorTimes::parse(text)) << text;
  }
}

TEST(ProcessorLoad, IsAShare) {
  tuning::ProcessorLoad load;
  EXPECT_EQ(load.share(), 1);  // nothing is known yet
  std::this_thread::sleep_for(std::chrono::milliseconds(450));
  const double share = load.share();
  EXPECT_GE(share, 0);
  EXPECT_LE(share, 1);
  EXPECT_EQ(load.share(), share);  // not looked at again so soon
}

TEST(ProcessorLoad, WorkTakesLittleWhereProcessorsIdle) {
  const auto taken = tuning::ProcessorLoad::taken_by_work;
  EXPECT_EQ(taken(0), 0);
  EXPECT_LT(taken(0.2), 0.5);
  EXPECT_GT(taken(0.9), 1);
  for (double share = 0; share < 1; share += 0.1) EXPECT_LT(taken(share), taken(share + 0.1));
}

}  // namespace
}  // namespace topreduce::laws
