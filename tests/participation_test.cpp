// Ranks that leave parameters unused, and ranks that run out of data: for rows of laws.h. What
// no rank used is not delivered; means are over all ranks or over those present; whole numbers make
// every sum exact.

#include "topreduce/participation.h"

#include <cmath>
#include <numeric>
#include <tuple>

#include "cluster.h"
#include "expect_error.h"
#include "topreduce/catalog.h"
#include "topreduce/comm/decorator.h"

namespace topreduce::laws {
namespace {

constexpr int kSteps = 8;
constexpr std::size_t kNobodys[] = {3, 4, 7};  // parameters that no rank uses in odd steps
constexpr std::size_t kSomeones[] = {0, 6};    // that rank 0 alone does not use

using Divisor = Participation::Divisor;
using Presence = Participation::Presence;

/// One step of all ranks: who uses what, and gradients that are zero where nothing is used.
struct Scene {
  Scene(const Layout& layout, int ranks, int step) {
    unused.resize(static_cast<std::size_t>(ranks));
    for (int r = 0; r < ranks; ++r) {
      auto& mine = unused[static_cast<std::size_t>(r)];
      if (step % 2 == 1) mine.assign(std::begin(kNobodys), std::end(kNobodys));
      if (r == 0) mine.insert(mine.end(), std::begin(kSomeones), std::end(kSomeones));
      gradients.push_back(integers(r, step, layout.size()));
      for (const std::size_t id : mine) silence(layout[id], gradients.back());
    }
    for (const auto& mine : unused) participation.push_back({.unused = mine});
  }

  void join(const Layout& layout, std::size_t rank, Divisor divisor) {
    std::ranges::fill(gradients[rank], 0.0f);
    unused[rank].resize(layout.count());
    std::iota(unused[rank].begin(), unused[rank].end(), std::size_t{0});
    participation[rank].presence = Presence::joined;
    participation[rank].unused = {};  // a rank that has joined used none
    for (Participation& each : participation) each.divisor = divisor;
  }

  bool used(std::size_t id) const {
    return std::ranges::any_of(
        unused, [&](const auto& mine) { return std::ranges::find(mine, id) == mine.end(); });
  }

  static void silence(const Parameter& parameter, Floats& gradient) {
    std::fill_n(gradient.begin() + static_cast<std::ptrdiff_t>(parameter.offset), parameter.size,
                0.0f);
  }

  std::vector<std::vector<std::size_t>> unused;
  std::vector<Floats> gradients;
  std::vector<Participation> participation;
};

class Attending : public testing::TestWithParam<RowOnRanks> {
 protected:
  int ranks() const { return std::get<1>(GetParam()); }

  /// The row with a memory in which every law is exact.
  Spec residual() const {
    Spec spec = parse_spec(std::get<0>(GetParam()));
    spec.settings["feedback"] = "residual";
    spec.settings["keep_dense"] = "";
    return spec;
  }

  static std::vector<Floats> debts(Cluster& cluster) {
    std::vector<Floats> owed;
    for (const Reducer& each : cluster.reducers()) {
      owed.emplace_back(each.owed().begin(), each.owed().end());
    }
    return owed;
  }

  /// What left the books is what everyone applies, times the divisor; of what nobody used, nothing.
  static void expect_law(Cluster& cluster, const Scene& scene, const std::vector<Floats>& before,
                         const std::vector<Outcome>& outcomes, float divisor) {
    const Layout& layout = cluster[0].layout();
    const bool scales = has_scales(cluster[0]);
    for (std::size_t id = 0; id < layout.count(); ++id) {
      for (std::size_t i = layout[id].offset; i < layout[id].offset + layout[id].size; ++i) {
        double settled = 0, size = 0;
        for (std::size_t r = 0; r < outcomes.size(); ++r) {
          size += std::abs(before[r][i]) + std::abs(scene.gradients[r][i]);
          settled +=
              static_cast<double>(before[r][i]) + scene.gradients[r][i] - outcomes[r].owed[i];
          const bool untouched = outcomes[r].owed[i] == before[r][i];
          ASSERT_TRUE(scene.used(id) || untouched) << layout[id].name;
        }
        ASSERT_NEAR(outcomes[0].gradient[i], static_cast<float>(settled) / divisor,
                    scales ? 1e-5 * size : 0)
            << layout[id].name;
      }
    }
    for (const Outcome& outcome : outcomes) {
      ASSERT_FALSE(outcome.failed()) << outcome.error;
      ASSERT_TRUE(same_bits(outcome.gradient, outcomes[0].gradient));
      ASSERT_EQ(outcome.stats.delivered, outcomes[0].stats.delivered);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Rows, Attending, testing::ValuesIn(rows_on_ranks()), [](const auto& test) {
  return name_of(std::get<0>(test.param)) + "_on_" + std::to_string(std::get<1>(test.param));
});

TEST_P(Attending, WhatNobodyUsedStaysOwed) {
  const Layout layout = small_model();
  Cluster cluster(ranks(), layout, residual());
  for (int s = 0; s < kSteps; ++s) {
    SCOPED_TRACE("step " + std::to_string(s));
    cluster.hand_over_by(s % 2 == 0 ? Handing::add : Handing::lend_and_deliver);
    const Scene scene(layout, ranks(), s);
    const auto before = debts(cluster);
    const auto outcomes =
        cluster.step(scene.gradients, three_buckets(layout), 1, {}, scene.participation);
    ASSERT_NO_FATAL_FAILURE(
        expect_law(cluster, scene, before, outcomes, static_cast<float>(ranks())));
  }
}

TEST_P(Attending, RanksThatHaveJoinedBringWhatTheyOwe) {
  const Layout layout = small_model();
  for (const Divisor divisor : {Divisor::ranks, Divisor::present}) {
    Cluster cluster(ranks(), layout, residual());
    for (int s = 0; s < kSteps; ++s) {
      SCOPED_TRACE("step " + std::to_string(s));
      cluster.hand_over_by(s % 2 == 0 ? Handing::add : Handing::lend_and_deliver);
      Scene scene(layout, ranks(), s);
      int present = ranks();
      for (; s >= 2 && present > std::max(1, ranks() - 2); --present) {
        scene.join(layout, static_cast<std::size_t>(present - 1), divisor);
      }
      const auto before = debts(cluster);
      const auto outcomes =
          cluster.step(scene.gradients, three_buckets(layout), 1, {}, scene.participation);
      const int by = divisor == Divisor::ranks ? ranks() : present;
      ASSERT_NO_FATAL_FAILURE(expect_law(cluster, scene, before, outcomes, static_cast<float>(by)));
    }
  }
}

// Every row with its own memory: an estimate is a mean over all ranks, whatever it is divided by.
TEST_P(Attending, DensityOneIsThePlainMean) {
  const Layout layout = small_model();
  Spec spec = parse_spec(std::get<0>(GetParam()));
  spec.settings["density"] = "1";
  spec.settings["values"] = "fp32";
  const std::string feedback =
      parse_spec(Reducer(layout, spec).spec().settings.at("feedback")).name;
  if (feedback == "ef21m") spec.settings["feedback"] = "ef21m:eta=1";
  if (feedback == "momentum") spec.settings["feedback"] = "residual";
  for (const Divisor divisor : {Divisor::ranks, Divisor::present}) {
    Cluster cluster(ranks(), layout, spec);
    for (int s = 0; s < kSteps; ++s) {
      Scene scene(layout, ranks(), s);
      const bool joined = s >= 3 && ranks() > 1;
      if (joined) scene.join(layout, 1, divisor);
      const auto outcomes =
          cluster.step(scene.gradients, reversed(layout), 1, {}, scene.participation);
      const int by = joined && divisor == Divisor::present ? ranks() - 1 : ranks();
      for (std::size_t id = 0; id < layout.count(); ++id) {
        for (std::size_t i = layout[id].offset; i < layout[id].offset + layout[id].size; ++i) {
          float sum = 0;
          for (const Floats& gradient : scene.gradients) sum += gradient[i];
          ASSERT_NEAR(outcomes[0].gradient[i], sum / static_cast<float>(by), 1e-4)
              << layout[id].name << " in step " << s;
        }
      }
    }
  }
}

TEST_P(Attending, BucketCutsDoNotMatter) {
  const Layout layout = small_model();
  std::vector<std::vector<Outcome>> first;
  for (const Cut& cut : {one_bucket(layout), per_parameter(layout), reversed(layout)}) {
    Cluster cluster(ranks(), layout, std::get<0>(GetParam()));
    for (int s = 0; s < 4; ++s) {
      const Scene scene(layout, ranks(), s);
      const auto outcomes = cluster.step(scene.gradients, cut, 1, {}, scene.participation);
      if (first.size() < 4) {
        first.push_back(outcomes);
        continue;
      }
      for (std::size_t r = 0; r < outcomes.size(); ++r) {
        const Outcome& expected = first[static_cast<std::size_t>(s)][r];
        ASSERT_TRUE(same_bits(outcomes[r].gradient, expected.gradient)) << "step " << s;
        ASSERT_EQ(outcomes[r].state, expected.state) << "step " << s;
      }
    }
  }
}

// ---- the round itself --------------------------------------------------------------------------

TEST(RollCalls, TakeARoundOnlyIfSomeoneHasSomethingToSay) {
  const Layout layout = small_model();
  Cluster cluster(3, layout, "topk:density=0.05,values=fp32,granularity=model");
  const auto gradients =
      gradients_of(3, 0, [&](int r, int step) { return integers(r, step, layout.size()); });
  std::vector<Participation> participation(3);
  const auto rounds = [&] {
    return cluster.step(gradients, three_buckets(layout), 1, {}, participation)[1].stats.rounds;
  };
  EXPECT_EQ(rounds(), 2);  // the exchange and the vote
  for (Participation& each : participation) each.divisor = Divisor::present;
  EXPECT_EQ(rounds(), 2);
  const std::size_t unused[] = {2};  // an empty parameter
  participation[2].unused = unused;
  EXPECT_EQ(rounds(), 3);
}

TEST(RollCalls, ManyParameters) {
  std::vector<Parameter> parameters;
  for (int i = 0; i < 1000; ++i) parameters.push_back({std::to_string(i), {2}});
  const Layout layout(parameters);
  for (const std::size_t one_in : {1u, 2u, 500u}) {
    Cluster cluster(2, layout, "dense");
    std::vector<std::size_t> unused;
    for (std::size_t id = 0; id < 1000; id += one_in) unused.push_back(id);
    const std::vector<Participation> participation(2, Participation{.unused = unused});
    const auto outcomes = cluster.step({Floats(2000, 1.0f), Floats(2000, 3.0f)}, one_bucket(layout),
                                       1, {}, participation);
    for (std::size_t i = 0; i < 2000; ++i) {
      ASSERT_EQ(outcomes[1].gradient[i], i / 2 % one_in == 0 ? 3.0f : 2.0f) << i;
    }
    EXPECT_EQ(outcomes[0].stats.delivered, 2000 - 2 * unused.size());
  }
}

TEST(RollCalls, RanksThatDivideDifferentlyAreAllTold) {
  const Layout layout = small_model();
  Cluster cluster(3, layout, "topk:density=0.05,values=fp32");
  Scene scene(layout, 3, 0);
  cluster.step(scene.gradients, three_buckets(layout), 1, {}, scene.participation);
  const State before = state_of(cluster[1]);
  scene.participation[1].divisor = Divisor::present;
  expect_error(
      [&] { cluster.step(scene.gradients, three_buckets(layout), 1, {}, scene.participation); },
      {"1 of 3 want"});
  EXPECT_EQ(cluster[0].step(), 1);
  EXPECT_EQ(cluster[2].step(), 1);
  EXPECT_EQ(state_of(cluster[1]), before);
}

/// Loses the connection in a roll call: the second round of the vote.
class Severed final : public comm::Decorator {
 public:
  using Decorator::Decorator;

  void post(int peer, const comm::Tag& tag, std::span<const std::byte> head,
            std::span<const std::byte> bytes) override {
    if (tag == comm::Tag{comm::kVote, 1}) throw CommError("the cable is cut");
    Decorator::post(peer, tag, head, bytes);
  }
};

TEST(RollCalls, AFailureInItLeavesNoTrace) {
  const Layout layout = small_model();
  Cluster cluster(2, layout, "topk:density=0.05,values=fp32,granularity=model");
  const Scene first(layout, 2, 0), second(layout, 2, 1);
  cluster.step(first.gradients, one_bucket(layout), 1, {}, first.participation);
  const State before = state_of(cluster[0]);
  const auto outcomes = cluster.step(
      second.gradients, one_bucket(layout), 1,
      [](Communicator& comm) { return std::make_unique<Severed>(comm); }, second.participation);
  EXPECT_EQ(outcomes[0].error, "the cable is cut");
  EXPECT_EQ(outcomes[0].state, before);
  EXPECT_TRUE(same_bits(outcomes[0].gradient, second.gradients[0]));
}

TEST(RollCalls, MistakesAreNamed) {
  run_ranks(1, [](Communicator& comm) {
    Reducer reducer(one_parameter(2), "dense");
    const std::size_t unused[] = {1};
    EXPECT_THROW(reducer.participate({}), std::invalid_argument);
    reducer.begin(comm);
    EXPECT_THROW(reducer.participate({.unused = unused}), std::invalid_argument);
    Floats gradient(2);
    const std::size_t all[] = {0};
    reducer.add(all, gradient);
    EXPECT_NO_THROW(reducer.participate({}));
    reducer.finish();
    EXPECT_THROW(reducer.participate({}), std::invalid_argument);
  });
}

}  // namespace
}  // namespace topreduce::laws
