// reduce=native: sums by the transport's own all-reduce, which adds in any order. Ranks as threads
// add backwards.

#include <cmath>

#include "cluster.h"
#include "expect_error.h"
#include "topreduce/comm/decorator.h"
#include "topreduce/reducer.h"

namespace topreduce::laws {
namespace {

constexpr const char* kNative[] = {
    "dense",
    "dense:granularity=model",
    "randk:density=0.2",
    "randk:density=0.2,feedback=none,keep_dense=*bias",
    "arc_topk:density=0.2",
    "arc_topk:density=0.2,ranked=model,granularity=model",
    "arc_topk:density=0.1,width=16,random=0.25,keep_dense=*bias",
};
constexpr int kNativeSteps = 6;

Spec native_spec(const char* method) {
  Spec spec = parse_spec(method);
  spec.settings["reduce"] = "native";
  return spec;
}
Spec compared_spec(const char* method) {
  Spec spec = native_spec(method);
  spec.settings["compare"] = "on";
  return spec;
}
Spec ordered_spec(const char* method) {
  Spec spec = parse_spec(method);
  spec.settings["values"] = "fp32";
  return spec;
}

/// All |got - want| <= 2^-20 of the largest.
void expect_rounding(const Floats& got, const Floats& want) {
  ASSERT_EQ(got.size(), want.size());
  float largest = 0;
  for (const float x : want) largest = std::max(largest, std::abs(x));
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-6f * largest) << i;
}

class Native : public testing::TestWithParam<const char*> {
 protected:
  std::vector<Floats> gradients(int ranks, int step) const {
    return gradients_of(ranks, step, [&](int r, int s) { return heavy_tailed(r, s, layout_); });
  }
  const Layout layout_ = small_model();
};

INSTANTIATE_TEST_SUITE_P(Methods, Native, testing::ValuesIn(kNative),
                         [](const auto& test) { return name_of(test.param); });

// Sums of whole numbers are exact in any order: so all bits are those of ordered sums.
TEST_P(Native, WholeNumbersAreExact) {
  const auto some = kSanitized && !kLong ? kRankCounts : std::vector{1, 2, 3, 5, 8};
  for (const int ranks : some) {
    Cluster want(ranks, layout_, ordered_spec(GetParam())),
        got(ranks, layout_, compared_spec(GetParam()));
    for (int s = 0; s < kNativeSteps; ++s) {
      const auto given = gradients_of(
          ranks, s, [&](int r, int step) { return integers(r, step, layout_.size()); });
      const auto expected = want.step(given, three_buckets(layout_));
      const auto outcomes = got.step(given, reversed(layout_));
      for (std::size_t r = 0; r < outcomes.size(); ++r) {
        ASSERT_EQ(outcomes[r].error, "");
        // Sketches are no whole numbers: rows that tie there may come in another order.
        if (std::string_view(GetParam()).starts_with("arc")) continue;
        ASSERT_TRUE(same_bits(outcomes[r].gradient, expected[r].gradient)) << "step " << s;
        ASSERT_EQ(outcomes[r].state, expected[r].state) << "step " << s;
      }
    }
  }
}

TEST_P(Native, IsTheOrderedSumButForRounding) {
  for (const int ranks : {2, 3, 5, 8}) {
    Cluster want(ranks, layout_, ordered_spec(GetParam())),
        got(ranks, layout_, compared_spec(GetParam()));
    for (int s = 0; s < kNativeSteps; ++s) {
      const auto given = gradients(ranks, s);
      const auto expected = want.step(given, three_buckets(layout_));
      const auto outcomes = got.step(given, three_buckets(layout_));
      for (std::size_t r = 0; r < outcomes.size(); ++r) {
        ASSERT_EQ(outcomes[r].error, "");
        expect_rounding(outcomes[r].gradient, expected[r].gradient);
        expect_rounding(outcomes[r].owed, expected[r].owed);
        ASSERT_TRUE(same_bits(outcomes[r].gradient, outcomes[0].gradient));
      }
    }
  }
}

// What all ranks had is what they apply and what they still owe.
TEST_P(Native, NothingIsLost) {
  constexpr int kRanks = 3;
  Cluster cluster(kRanks, layout_, native_spec(GetParam()));
  if (cluster[0].owed().empty()) return;
  const auto places = places_in_memory(cluster[0]);
  std::vector<double> had(layout_.size()), applied(layout_.size());
  for (int s = 0; s < kNativeSteps; ++s) {
    const auto given = gradients(kRanks, s);
    const auto outcomes = cluster.step(given, per_parameter(layout_));
    for (std::size_t i = 0; i < had.size(); ++i) {
      double owed = 0;
      for (std::size_t r = 0; r < kRanks; ++r) {
        had[i] += static_cast<double>(given[r][i]);
        if (places[i] != kNotRemembered) owed += static_cast<double>(outcomes[r].owed[places[i]]);
      }
      applied[i] += kRanks * static_cast<double>(outcomes[0].gradient[i]);
      ASSERT_NEAR(applied[i] + owed, had[i], 1e-4) << "entry " << i << ", step " << s;
    }
  }
}

/// Changes what rank 1 gets of the `which`-th native sum: its last value.
class Differing final : public comm::Decorator {
 public:
  Differing(Communicator& inner, int which) : Decorator(inner), left_(which) {}

 protected:
  void do_native_all_reduce(std::span<float> values) override {
    Decorator::do_native_all_reduce(values);
    if (rank() == 1 && left_-- == 0) values.back() += 1;
  }

 private:
  int left_;
};

TEST(NativeSums, ThatDifferAreFoundIfCompared) {
  const Layout layout = small_model();
  for (const char* method : {"dense:granularity=model", "randk:density=0.3,granularity=model"}) {
    for (const bool compares : {true, false}) {
      Cluster cluster(3, layout, compares ? compared_spec(method) : native_spec(method));
      const auto given =
          gradients_of(3, 0, [&](int r, int s) { return heavy_tailed(r, s, layout); });
      const auto before = state_of(cluster[0]);
      const auto outcomes = cluster.step(given, one_bucket(layout), 1, [](Communicator& comm) {
        return std::make_unique<Differing>(comm, 0);
      });
      for (std::size_t r = 0; r < outcomes.size(); ++r) {
        EXPECT_EQ(outcomes[r].failed(), compares) << outcomes[r].error;
        if (!compares) continue;
        EXPECT_NE(outcomes[r].error.find(
                      "rank 1 has other sums of gradients than ranks 0, 2; the transport"),
                  std::string::npos);
        EXPECT_TRUE(same_bits(outcomes[r].gradient, given[r]));
        EXPECT_EQ(outcomes[r].state, before);
      }
      EXPECT_EQ(outcomes[0].gradient == outcomes[1].gradient, false);
    }
  }
}

/// Gives rank 1 other sketches, so that it chooses other rows; of other lengths too.
class OtherSketches final : public comm::Decorator {
 public:
  using Decorator::Decorator;

 protected:
  void do_native_all_reduce(std::span<float> values) override {
    Decorator::do_native_all_reduce(values);
    if (rank() != 1 || calls_++ > 0) return;
    for (std::size_t i = values.size() / 2; i < values.size(); ++i) values[i] = 1e6f;
  }

 private:
  int calls_ = 0;
};

// All ranks are told, before they add up what does not belong together.
TEST(NativeSums, RanksThatChoseOtherRowsAreAllTold) {
  const Layout layout({{"wide", {20, 30}}, {"narrow", {40, 7}}});
  for (const char* method : {"arc_topk:density=0.2,bucket_cap_mb=1",
                             "arc_topk:density=0.2,ranked=model,granularity=model"}) {
    Cluster cluster(3, layout, native_spec(method));
    const auto given = gradients_of(3, 0, [&](int r, int s) { return heavy_tailed(r, s, layout); });
    const auto before = state_of(cluster[0]);
    const auto outcomes = cluster.step(given, one_bucket(layout), 1, [](Communicator& comm) {
      return std::make_unique<OtherSketches>(comm);
    });
    for (std::size_t r = 0; r < outcomes.size(); ++r) {
      EXPECT_NE(outcomes[r].error.find("chose different rows"), std::string::npos)
          << outcomes[r].error;
      EXPECT_TRUE(same_bits(outcomes[r].gradient, given[r]));
      EXPECT_EQ(outcomes[r].state, before);
    }
    // The communicators are in step: the same ranks may go on.
    const auto again = cluster.step(given, one_bucket(layout));
    for (const Outcome& outcome : again) EXPECT_EQ(outcome.error, "");
  }
}

/// The fingerprint that all ranks add up beside the values, of one rank changed on its way.
class OtherParameters final : public comm::Decorator {
 public:
  using Decorator::Decorator;

 protected:
  void do_native_all_reduce(std::span<float> values) override {
    if (rank() == 2) values[0] = values[0] == 3 ? 4.0f : 3.0f;
    Decorator::do_native_all_reduce(values);
  }
};

TEST(NativeSums, RanksThatAddOtherParametersAreAllTold) {
  const Layout layout = small_model();
  for (const char* method : {"dense", "randk:density=0.3", "arc_topk:density=0.2"}) {
    Cluster cluster(4, layout, native_spec(method));
    const auto given = gradients_of(4, 0, [&](int r, int s) { return heavy_tailed(r, s, layout); });
    const auto outcomes = cluster.step(given, one_bucket(layout), 1, [](Communicator& comm) {
      return std::make_unique<OtherParameters>(comm);
    });
    int told = 0;
    for (std::size_t r = 0; r < outcomes.size(); ++r) {
      EXPECT_TRUE(outcomes[r].failed());
      told += outcomes[r].error.find("different parameters") != std::string::npos ? 1 : 0;
      EXPECT_TRUE(same_bits(outcomes[r].gradient, given[r]));
    }
    EXPECT_EQ(told, 4) << outcomes[0].error;
  }
}

TEST(NativeSums, TheFingerprintIsExactOnManyRanks) {
  const int ranks = kSanitized ? 20 : 300;
  Cluster cluster(ranks, one_parameter(3), native_spec("dense"));
  const auto given = gradients_of(ranks, 0, [](int, int) { return Floats{1, 2, 3}; });
  for (const Outcome& outcome : cluster.step(given, {{0}})) {
    ASSERT_EQ(outcome.error, "");
    ASSERT_EQ(outcome.gradient, (Floats{1, 2, 3}));
  }
}

TEST(NativeSums, AreForThoseThatNeedNoMore) {
  const auto refused = [](const char* spec, const std::vector<std::string>& words) {
    SCOPED_TRACE(spec);
    expect_error([&] { Reducer reducer(small_model(), spec); }, words);
  };
  for (const char* method : {"topk", "topk_dsa", "gtopk", "ok_topk", "dgc", "gaussiank"}) {
    refused((std::string(method) + ":reduce=native").c_str(),
            {"reduce=native", "dense, randk, arc_topk"});
  }
  refused("dense:reduce=native,values=int4,feedback=residual", {"reduce=native", "values=int4"});
  refused("randk:reduce=native,values=bf16", {"reduce=native", "values=bf16"});
  EXPECT_NO_THROW(Reducer(small_model(), "randk:reduce=native,values=fp32"));
}

/// A transport without an all-reduce of its own.
class Plain final : public comm::Decorator {
 public:
  using Decorator::Decorator;
  bool has_native_all_reduce() const override { return false; }
};

TEST(NativeSums, NeedATransportThatHasThem) {
  Cluster cluster(2, one_parameter(5), native_spec("dense"));
  expect_error(
      [&] {
        cluster.step({Floats(5), Floats(5)}, {{0}}, 1,
                     [](Communicator& comm) { return std::make_unique<Plain>(comm); });
      },
      {"reduce=native", "reduce=ordered"});
}

}  // namespace
}  // namespace topreduce::laws
