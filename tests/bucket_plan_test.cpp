// Buckets of our own: how they are cut, in which order they go, that gradients may come in any
// grouping and order, different on every rank, and move before the step is finished.

#include "topreduce/bucket_plan.h"

#include <algorithm>
#include <random>

#include "cluster.h"
#include "expect_error.h"
#include "topreduce/comm/self.h"
#include "topreduce/reducer.h"

namespace topreduce::laws {
namespace {

using Order = std::vector<std::size_t>;

Cut cut_of(const BucketPlan& plan) {
  Cut cut;
  for (std::size_t b = 0; b < plan.count(); ++b) cut.emplace_back(plan[b].begin(), plan[b].end());
  return cut;
}

Order shuffled(std::size_t count, unsigned seed) {
  Order order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::shuffle(order, std::mt19937(seed));
  return order;
}

Layout sizes(const std::vector<std::size_t>& of) {
  std::vector<Parameter> parameters;
  for (std::size_t i = 0; i < of.size(); ++i) {
    parameters.push_back({.name = "p" + std::to_string(i), .shape = {of[i]}});
  }
  return Layout(std::move(parameters));
}

// ---- the plan ----------------------------------------------------------------------------------

TEST(BucketPlan, FillsBucketsInOrder) {
  const Layout layout = sizes({3, 4, 5, 20, 1, 1, 0});
  EXPECT_EQ(cut_of({layout, reverse_order(layout), 7}), (Cut{{3, 4, 5, 6}, {1, 2}, {0}}));
  EXPECT_EQ(cut_of({layout, Order{3, 0, 5, 1, 2, 6, 4}, 7}), (Cut{{3}, {0, 1, 5}, {2, 4, 6}}));
  EXPECT_EQ(cut_of({layout, reverse_order(layout), 1000}), (Cut{{0, 1, 2, 3, 4, 5, 6}}));
  const BucketPlan plan(layout, reverse_order(layout), 7);
  for (std::size_t b = 0; b < plan.count(); ++b) {
    for (const std::size_t id : plan[b]) EXPECT_EQ(plan.bucket_of(id), b);
  }
}

TEST(BucketPlan, HasAtMost64Buckets) {
  const Layout layout = sizes(std::vector<std::size_t>(1000, 3));
  EXPECT_LE(BucketPlan(layout, reverse_order(layout), 0).count(), BucketPlan::kMost);
  EXPECT_GT(BucketPlan(layout, reverse_order(layout), 0).count(), BucketPlan::kMost - 5);
}

TEST(BucketPlan, MayBeEmpty) {
  EXPECT_EQ(BucketPlan().count(), 0);
  EXPECT_EQ(BucketPlan(Layout(), {}, 5).count(), 0);
  EXPECT_EQ(cut_of({sizes({0, 0}), Order{1, 0}, 5}), (Cut{{0, 1}}));
}

TEST(BucketPlan, KnowsAnOrder) {
  EXPECT_TRUE(is_order(Order{2, 0, 1}, 3));
  EXPECT_FALSE(is_order(Order{2, 0, 2}, 3));
  EXPECT_FALSE(is_order(Order{2, 0, 3}, 3));
  EXPECT_FALSE(is_order(Order{2, 0}, 3));
}

// ---- any grouping, any order -------------------------------------------------------------------

/// Adds `gradient` to the open step, parameter after parameter in `order`, one to three at a time.
void add_in_groups(Reducer& reducer, const Order& order, std::span<float> gradient,
                   std::vector<Floats>& kept) {
  const Layout& layout = reducer.layout();
  kept.clear();
  kept.reserve(order.size());
  for (std::size_t i = 0; i < order.size();) {
    const std::size_t count = std::min(order.size() - i, 1 + i % 3);
    const auto group = std::span(order).subspan(i, count);
    Floats& values = kept.emplace_back();
    for (const std::size_t id : group) {
      const auto part = gradient.subspan(layout[id].offset, layout[id].size);
      values.insert(values.end(), part.begin(), part.end());
    }
    reducer.add(group, values);
    i += count;
  }
}

/// As add_in_groups, the other way round, after `finish`.
void take_in_groups(const Layout& layout, const Order& order, const std::vector<Floats>& kept,
                    std::span<float> gradient) {
  std::size_t next = 0;
  for (const Floats& values : kept) {
    for (std::size_t start = 0, n = 0; n < 1 + next % 3 && next + n < order.size(); ++n) {
      const Parameter& parameter = layout[order[next + n]];
      std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(start), parameter.size,
                  gradient.begin() + static_cast<std::ptrdiff_t>(parameter.offset));
      start += parameter.size;
    }
    next += 1 + next % 3;
  }
}

class Grouping : public testing::TestWithParam<const char*> {
 protected:
  static constexpr int kRanks = 3;

  Cluster cluster(const char* cap) const {
    Spec spec = parse_spec(GetParam());
    spec.settings["bucket_cap_mb"] = cap;
    return {kRanks, layout_, spec};
  }
  std::vector<Floats> gradients(int step) const {
    return gradients_of(kRanks, step, [&](int r, int s) { return heavy_tailed(r, s, layout_); });
  }

  const Layout layout_ = small_model();
};

INSTANTIATE_TEST_SUITE_P(Rows, Grouping, testing::ValuesIn(fewer_rows()),
                         [](const auto& test) { return name_of(test.param); });

// Every rank has another order in every step; each parameter is moved once it was added.
TEST_P(Grouping, MayDifferByRankAndStep) {
  Cluster reference = cluster("1");
  Cluster tried = cluster("0");
  for (int s = 0; s < kCutSteps; ++s) {
    const auto given = gradients(s);
    const auto want = reference.step(given, one_bucket(layout_));
    const auto got = meet(tried.reducers(), [&](Reducer& reducer, Communicator& comm) {
      Outcome outcome;
      const auto rank = static_cast<std::size_t>(comm.rank());
      const Order order = shuffled(layout_.count(), static_cast<unsigned>(10 * s + comm.rank()));
      outcome.gradient = given[rank];
      std::vector<Floats> groups;
      reducer.begin(comm);
      add_in_groups(reducer, order, outcome.gradient, groups);
      outcome.stats = reducer.finish();
      take_in_groups(layout_, order, groups, outcome.gradient);
      outcome.state = state_of(reducer);
      return outcome;
    });
    for (std::size_t r = 0; r < kRanks; ++r) {
      ASSERT_TRUE(same_bits(got[r].gradient, want[r].gradient)) << "step " << s;
      ASSERT_EQ(got[r].state, want[r].state) << "step " << s;
    }
  }
}

// What was added may move before `finish`, before and after its exchange; where it was is left
// alone.
TEST_P(Grouping, GradientsMayMove) {
  Cluster reference = cluster("1");
  Cluster tried = cluster("0");
  for (int s = 0; s < 3; ++s) {
    const auto given = gradients(s);
    const auto want = reference.step(given, one_bucket(layout_));
    const auto got = meet(tried.reducers(), [&](Reducer& reducer, Communicator& comm) {
      Outcome outcome;
      const auto rank = static_cast<std::size_t>(comm.rank());
      Floats first = given[rank];
      outcome.gradient = given[rank];
      reducer.begin(comm);
      const Order order = reverse_order(layout_);
      for (const std::size_t id : order) {
        const std::size_t ids[] = {id};
        const Parameter& parameter = layout_[id];
        reducer.add(ids, std::span(first).subspan(parameter.offset, parameter.size));
        if (id % 2 == 0) continue;
        reducer.relocate(ids,
                         std::span(outcome.gradient).subspan(parameter.offset, parameter.size));
        std::fill_n(first.begin() + static_cast<std::ptrdiff_t>(parameter.offset), parameter.size,
                    -1.0f);
      }
      for (std::size_t id = 0; id < layout_.count(); id += 2) {
        const std::size_t ids[] = {id};
        const Parameter& parameter = layout_[id];
        reducer.relocate(ids,
                         std::span(outcome.gradient).subspan(parameter.offset, parameter.size));
        std::fill_n(first.begin() + static_cast<std::ptrdiff_t>(parameter.offset), parameter.size,
                    -1.0f);
      }
      outcome.stats = reducer.finish();
      EXPECT_TRUE(std::ranges::all_of(first, [](float x) { return x == -1; }));
      outcome.state = state_of(reducer);
      return outcome;
    });
    for (std::size_t r = 0; r < kRanks; ++r) {
      ASSERT_TRUE(same_bits(got[r].gradient, want[r].gradient)) << "step " << s;
      ASSERT_EQ(got[r].state, want[r].state) << "step " << s;
    }
  }
}

// ---- the order of buckets ----------------------------------------------------------------------

TEST(Buckets, FollowTheOrderOfRankZero) {
  const Layout layout = sizes({10, 20, 30, 40, 50});
  Cluster cluster(3, layout, "topk:density=0.1,bucket_cap_mb=0");
  const Order of_rank_0 = {2, 4, 0, 1, 3};
  const auto step = [&] {
    run_ranks(3, [&](Communicator& comm) {
      Reducer& reducer = cluster[comm.rank()];
      Floats gradient(layout.size(), 1.0f);
      reducer.begin(comm);
      for (const std::size_t id : comm.rank() == 0 ? of_rank_0 : shuffled(5, 7)) {
        const std::size_t ids[] = {id};
        reducer.add(ids, std::span(gradient).subspan(layout[id].offset, layout[id].size));
      }
      reducer.finish();
    });
  };
  const Cut reversed_cut = {{4}, {3}, {2}, {1}, {0}}, agreed = {{2}, {4}, {0}, {1}, {3}};
  for (int s = 0; s < 4; ++s) {
    step();
    for (const Reducer& reducer : cluster.reducers()) {
      EXPECT_EQ(reducer.buckets(), s == 0 ? reversed_cut : agreed) << "step " << s;
    }
  }
  // Ranks that agree anew may be others, who have seen nothing.
  run_ranks(3, [&](Communicator& comm) { cluster[comm.rank()].agree(comm); });
  for (const Reducer& reducer : cluster.reducers()) EXPECT_EQ(reducer.buckets(), reversed_cut);
  step();
  step();
  for (const Reducer& reducer : cluster.reducers()) EXPECT_EQ(reducer.buckets(), agreed);
}

// Each bucket goes out as soon as it is there, whatever the order of the plan.
TEST(Buckets, StartWhenTheyAreComplete) {
  const Layout layout = sizes({10, 20, 30, 40});
  Cluster cluster(2, layout, "topk:density=0.5,bucket_cap_mb=0");
  run_ranks(2, [&](Communicator& comm) {
    Reducer& reducer = cluster[comm.rank()];
    Floats gradient(layout.size(), 1.0f);
    reducer.begin(comm);
    const std::uint64_t before = comm.traffic().messages;
    std::vector<std::uint64_t> messages;
    for (const std::size_t id : {2u, 3u, 0u, 1u}) {  // buckets are 3, 2, 1, 0
      const std::size_t ids[] = {id};
      reducer.add(ids, std::span(gradient).subspan(layout[id].offset, layout[id].size));
      messages.push_back(comm.traffic().messages - before);
    }
    EXPECT_EQ(messages, (std::vector<std::uint64_t>{1, 2, 3, 4}));
    const StepStats& stats = reducer.finish();
    EXPECT_GT(stats.seconds_exchanging, 0);
  });
}

// ---- mistakes ----------------------------------------------------------------------------------

TEST(Buckets, MistakesAreNamed) {
  const Layout layout = sizes({2, 3, 4});
  Reducer reducer(layout, "topk:density=0.5,bucket_cap_mb=0");
  comm::Self comm;
  Floats gradient(9, 1.0f);
  const std::size_t last[] = {2}, first[] = {0}, far[] = {7};
  expect_error([&] { reducer.relocate(last, gradient); }, {"relocate", "no step is open"});
  const auto wrong = [&](std::span<const std::size_t> ids, std::size_t size,
                         const std::vector<std::string>& words) {
    reducer.begin(comm);
    reducer.add(last, std::span(gradient).first(4));
    expect_error([&] { reducer.relocate(ids, std::span(gradient).first(size)); }, words);
    expect_error([&] { reducer.finish(); }, {"no step is open"});  // it was dropped
  };
  wrong(last, 3, {"relocate", "has 3 entries", "have 4"});
  wrong(first, 2, {"relocate", "'p0'", "was not added"});
  wrong(far, 2, {"relocate", "parameter 7", "was not added"});
  reducer.begin(comm);
  reducer.add(last, std::span(gradient).first(4));
  expect_error([&] { reducer.agree(comm); }, {"agree", "step is open"});
  expect_error([&] { reducer.begin(comm); }, {"begin", "step is open"});
  expect_error([&] { reducer.finish(); }, {"missing 2 of 3", "p0, p1"});
}

}  // namespace
}  // namespace topreduce::laws
