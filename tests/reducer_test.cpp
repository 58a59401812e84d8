// The laws of a step, for rows of laws.h on 1 to 8 ranks. Whole numbers make every sum exact,
// so the laws hold to the bit, rounded values included; with values that share a scale, up to the
// rounding of sums of floats.

#include "topreduce/reducer.h"

#include <cmath>
#include <set>
#include <tuple>

#include "cluster.h"
#include "topreduce/catalog.h"

namespace topreduce::laws {
namespace {

Choice choice_of(const Reducer& reducer) {
  return find_exchange(parse_spec(reducer.spec().settings.at("exchange")).name).choice;
}

// ---- one law for each feedback -----------------------------------------------------------------

struct Step {
  Cluster& cluster;
  const std::vector<Floats>& gradients;
  const std::vector<Floats>& owed_before;
  const std::vector<Outcome>& outcomes;
  bool exact;  // no values share a scale
};

// Over the ranks: what left their books is what everyone applies, before division.
bool keeps_residual_law(const Step& step, std::size_t i, std::size_t place) {
  double settled = 0, size = 0;
  for (std::size_t r = 0; r < step.gradients.size(); ++r) {
    const double before = step.owed_before[r][place], after = step.outcomes[r].owed[place];
    settled += before + step.gradients[r][i] - after;
    size += std::abs(before) + std::abs(step.gradients[r][i]) + std::abs(after);
  }
  const auto ranks = static_cast<float>(step.cluster.ranks());
  const float applied = step.outcomes[0].gradient[i];
  if (step.exact) return applied == static_cast<float>(settled) / ranks;
  return std::abs(applied * ranks - settled) <= 1e-6 * size;
}

// Nothing is owed: an entry is the sum over all ranks; or, if not everything is sent, nothing; or,
// where each rank chooses alone, the sum over some of them.
bool keeps_none_law(const Step& step, std::size_t i, Choice choice) {
  const auto ranks = static_cast<float>(step.cluster.ranks());
  const float mean = step.outcomes[0].gradient[i];
  float all = 0;
  for (const Floats& gradient : step.gradients) all += gradient[i];
  if (mean == all / ranks || (mean == 0 && choice != Choice::everything)) return true;
  if (choice != Choice::alone) return false;
  std::set<float> sums = {0};
  for (const Floats& gradient : step.gradients) {
    for (const float sum : Floats(sums.begin(), sums.end())) sums.insert(sum + gradient[i]);
  }
  return std::ranges::any_of(sums, [&](float sum) { return mean == sum / ranks; });
}

// The mean of the ranks' estimates is what everyone applies.
bool keeps_estimate_law(const Step& step, std::size_t i, std::span<const double> mean_estimate) {
  return std::abs(step.outcomes[0].gradient[i] - mean_estimate[i]) <= 1e-4;
}

// Over the ranks: what was unsent and is not any more is what everyone applies. Unsent is what is
// owed without the velocity's part in it.
bool keeps_momentum_law(const Step& step, std::size_t i, std::size_t place,
                        std::span<const Floats> velocities) {
  const auto scale = static_cast<double>(newest_scale(step.cluster[0]));
  const double momentum = feedback_number(step.cluster[0], "momentum", 0);
  double settled = 0;
  for (std::size_t r = 0; r < step.gradients.size(); ++r) {
    const double unsent = step.outcomes[r].owed[place] - momentum * velocities[r][place];
    settled += step.owed_before[r][place] + scale * step.gradients[r][i] - unsent;
  }
  return std::abs(step.outcomes[0].gradient[i] - settled / step.cluster.ranks()) <= 1e-3;
}

std::vector<double> mean_estimate(const Step& step, std::span<const std::size_t> places) {
  std::vector<double> mean(places.size());
  for (const Outcome& outcome : step.outcomes) {
    const Floats estimate = estimate_of(outcome.state);
    for (std::size_t i = 0; i < places.size(); ++i) {
      if (places[i] != kNotRemembered)
        mean[i] += static_cast<double>(estimate[places[i]]) / step.cluster.ranks();
    }
  }
  return mean;
}

void expect_law(const Step& step) {
  const Reducer& reducer = step.cluster[0];
  const std::string feedback = feedback_name(reducer);
  const bool estimate = feedback == "ef21" || feedback == "ef21m";
  const bool residual = feedback == "residual", momentum = feedback == "momentum";
  ASSERT_TRUE(residual || momentum || feedback == "none" || estimate)
      << feedback << " needs its law here";
  const std::size_t owed = residual || momentum ? reducer.remembered().size() : 0;
  ASSERT_EQ(step.outcomes[0].owed.size(), owed);
  const Choice choice = choice_of(reducer);
  const auto places = places_in_memory(reducer);
  const auto mean = estimate ? mean_estimate(step, places) : std::vector<double>();
  std::vector<Floats> velocities;
  for (const Outcome& outcome : step.outcomes) {
    if (momentum) velocities.push_back(floats_of(outcome.state, "momentum.velocity"));
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    const bool kept = places[i] == kNotRemembered;
    const bool lawful = kept       ? keeps_none_law(step, i, Choice::everything)
                        : residual ? keeps_residual_law(step, i, places[i])
                        : estimate ? keeps_estimate_law(step, i, mean)
                        : momentum ? keeps_momentum_law(step, i, places[i], velocities)
                                   : keeps_none_law(step, i, choice);
    ASSERT_TRUE(lawful) << "entry " << i << " is " << step.outcomes[0].gradient[i];
  }
}

void expect_same_on_every_rank(const std::vector<Outcome>& outcomes) {
  for (const Outcome& outcome : outcomes) {
    ASSERT_FALSE(outcome.failed()) << outcome.error;
    ASSERT_TRUE(same_bits(outcome.gradient, outcomes[0].gradient));
    ASSERT_EQ(outcome.stats.delivered, outcomes[0].stats.delivered);
    ASSERT_TRUE(outcome.stats.finite);
  }
}

// Runs steps of whole numbers, times `unit`, and checks each; at the end, what came in is what was
// applied plus what is owed.
void expect_laws(Cluster& cluster, const Cut& cut, int steps, float unit = 1) {
  const std::size_t n = cluster[0].layout().size();
  std::vector<double> came_in(n), applied(n);
  std::vector<Floats> owed(static_cast<std::size_t>(cluster.ranks()));
  for (std::size_t r = 0; r < owed.size(); ++r) {
    const auto now = cluster.reducers()[r].owed();
    owed[r].assign(now.begin(), now.end());
  }
  const bool exact = !has_scales(cluster[0]);
  for (int s = 0; s < steps; ++s) {
    SCOPED_TRACE("step " + std::to_string(s));
    auto gradients =
        gradients_of(cluster.ranks(), s, [&](int r, int step) { return integers(r, step, n); });
    for (Floats& gradient : gradients) {
      for (float& x : gradient) x *= unit;
    }
    const auto outcomes = cluster.step(gradients, cut);
    ASSERT_NO_FATAL_FAILURE(expect_same_on_every_rank(outcomes));
    ASSERT_NO_FATAL_FAILURE(expect_law({cluster, gradients, owed, outcomes, exact}));
    for (std::size_t i = 0; i < n; ++i) {
      for (const Floats& gradient : gradients) came_in[i] += gradient[i];
      const double sum = static_cast<double>(outcomes[0].gradient[i]) * cluster.ranks();
      applied[i] += exact ? std::round(sum) : sum;
    }
    for (std::size_t r = 0; r < owed.size(); ++r) owed[r] = outcomes[r].owed;
  }
  if (feedback_name(cluster[0]) != "residual") return;
  const auto places = places_in_memory(cluster[0]);
  for (std::size_t i = 0; i < n; ++i) {
    for (const Floats& rest : owed) applied[i] += places[i] == kNotRemembered ? 0 : rest[places[i]];
    ASSERT_NEAR(came_in[i], applied[i], exact ? 0 : 1e-4 * unit)
        << "entry " << i << " in all steps";
  }
}

// ---- rows on numbers of ranks -------------------------------------------------------------------

class Laws : public testing::TestWithParam<RowOnRanks> {
 protected:
  const char* row() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Rows, Laws, testing::ValuesIn(rows_on_ranks()), [](const auto& test) {
  return name_of(std::get<0>(test.param)) + "_on_" + std::to_string(std::get<1>(test.param));
});

TEST_P(Laws, NothingIsLost) {
  Cluster cluster(ranks(), small_model(), row());
  expect_laws(cluster, three_buckets(small_model()), kLawSteps);
}

// Numbers too long for 16 bits, so that values and sums are rounded: the difference stays owed, to
// the last unit.
TEST_P(Laws, RoundingIsNotLostEither) {
  Spec spec = parse_spec(row());
  spec.settings["feedback"] = "residual";
  spec.settings["keep_dense"] = "";
  Cluster cluster(ranks(), small_model(), spec);
  expect_laws(cluster, three_buckets(small_model()), kLawSteps, 999);
}

TEST_P(Laws, AllRanksGetTheSameBits) {
  const Layout layout = small_model();
  Cluster cluster(ranks(), layout, row());
  for (int s = 0; s < 5; ++s) {
    const auto gradients =
        gradients_of(ranks(), s, [&](int r, int step) { return heavy_tailed(r, step, layout); });
    expect_same_on_every_rank(cluster.step(gradients, reversed(layout)));
  }
}

// Neither the reducer's buckets, nor the order that rank 0 shows it in the first step, nor the
// grouping in which gradients come.
TEST_P(Laws, BucketsDoNotMatter) {
  const Layout layout = small_model();
  std::vector<std::vector<Outcome>> first;
  const char* caps[] = {"1", "0", "0.0003", "0.0001"};
  for (std::size_t i = 0; i < std::size(caps); ++i) {
    const Cut cut = all_cuts(layout)[i];
    Spec spec = parse_spec(row());
    spec.settings["bucket_cap_mb"] = caps[i];
    Cluster cluster(ranks(), layout, spec);
    for (int s = 0; s < kCutSteps; ++s) {
      const auto gradients =
          gradients_of(ranks(), s, [&](int r, int step) { return heavy_tailed(r, step, layout); });
      const auto outcomes = cluster.step(gradients, cut);
      if (std::ssize(first) < kCutSteps) {
        first.push_back(outcomes);
        continue;
      }
      for (std::size_t r = 0; r < outcomes.size(); ++r) {
        const Outcome& expected = first[static_cast<std::size_t>(s)][r];
        ASSERT_TRUE(same_bits(outcomes[r].gradient, expected.gradient)) << "step " << s;
        ASSERT_TRUE(same_bits(outcomes[r].owed, expected.owed)) << "step " << s;
        ASSERT_EQ(outcomes[r].state, expected.state) << "step " << s;
        ASSERT_EQ(outcomes[r].stats.selected, expected.stats.selected) << "step " << s;
      }
    }
  }
}

// ---- fewer rows, special models ---------------------------------------------------------------

class Models : public testing::TestWithParam<const char*> {
 protected:
  const char* row() const { return GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Rows, Models, testing::ValuesIn(fewer_rows()),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(Models, MayBeTiny) {
  const Layout layouts[] = {
      one_parameter(0), one_parameter(1), one_parameter(7),
      Layout({{"a.bias", {}}, {"b", {0}}, {"c.bias", {2, 0, 3}}, {"d", {2}}, {"e.bias", {4}}})};
  for (const Layout& layout : layouts) {
    for (const int ranks : {1, 2, 3}) {
      SCOPED_TRACE(std::to_string(layout.size()) + " entries, " + std::to_string(ranks) + " ranks");
      Cluster cluster(ranks, layout, row());
      expect_laws(cluster, per_parameter(layout), kLawSteps);
    }
  }
}

TEST_P(Models, MayHaveNoParameters) {
  Spec spec = parse_spec(row());
  spec.settings.erase("keep_dense");  // names a parameter
  Cluster cluster(2, Layout(), spec);
  expect_laws(cluster, {}, 3);
  expect_laws(cluster, {{}}, 3);
}

TEST_P(Models, MayBeLong) {
  const Layout layout({{"long.bias", {kMany - 1000}}, {"short", {1000}}});
  Cluster cluster(2, layout, row());
  expect_laws(cluster, one_bucket(layout), 2);
}

// An estimate equals it too, but for rounding: of the mean, or of its running mean. Momentum starts
// anew wherever it is sent.
TEST_P(Models, DensityOneEqualsDense) {
  const Layout layout = small_model();
  Spec spec = parse_spec(row());
  spec.settings["density"] = "1";
  spec.settings["values"] = "fp32";
  if (feedback_name(Reducer(layout, spec)) == "momentum") spec.settings["feedback"] = "momentum";
  Cluster cluster(3, layout, spec), dense(3, layout, "dense");
  const double share = newest_scale(cluster[0]);
  const auto places = places_in_memory(cluster[0]);
  std::vector<double> running(layout.size());
  for (int s = 0; s < 6; ++s) {
    auto gradients =
        gradients_of(3, s, [&](int r, int step) { return heavy_tailed(r, step, layout); });
    if (s < 3) {  // a parameter that wakes up late
      for (Floats& gradient : gradients) std::fill_n(gradient.begin(), layout[0].size, 0.0f);
    }
    const auto outcomes = cluster.step(gradients, three_buckets(layout));
    const auto expected = dense.step(gradients, three_buckets(layout));
    if (!estimate_of(outcomes[0].state).empty()) {
      for (std::size_t i = 0; i < running.size(); ++i) {
        const double newest = s == 0 || places[i] == kNotRemembered ? 1 : share;
        running[i] += newest * (expected[0].gradient[i] - running[i]);
        ASSERT_NEAR(outcomes[0].gradient[i], running[i], 1e-4) << "step " << s;
      }
      continue;
    }
    ASSERT_TRUE(same_bits(outcomes[0].gradient, expected[0].gradient)) << "step " << s;
    const Floats nothing(outcomes[0].owed.size());
    ASSERT_TRUE(same_bits(outcomes[0].owed, nothing)) << "step " << s;
  }
}

// A rank that has less than its budget sends what it has and nothing else.
TEST(Reducer, SendsNoZeros) {
  const Layout layout = small_model();
  Cluster cluster(2, layout, "topk:density=0.05,values=fp32,granularity=model");
  std::vector<Floats> gradients(2, Floats(layout.size()));
  gradients[0][3] = gradients[0][300] = 2;
  gradients[1][300] = -2;
  const auto outcomes = cluster.step(gradients, three_buckets(layout));
  EXPECT_EQ(outcomes[0].stats.selected, 2);
  EXPECT_EQ(outcomes[1].stats.selected, 1);
  Floats expected(layout.size());
  expected[3] = 1;
  EXPECT_TRUE(same_bits(outcomes[0].gradient, expected));
  EXPECT_TRUE(same_bits(outcomes[0].owed, Floats(layout.size())));
}

// With the paper's choice the step is known entry by entry: the k largest of owed + gradient.
TEST(Reducer, TopkEqualsAPlainReading) {
  constexpr std::size_t kEntries = 400, k = 20;
  constexpr int kRanks = 3;
  Cluster cluster(kRanks, one_parameter(kEntries),
                  "topk:density=0.05,values=fp32,granularity=model");
  std::vector<Floats> owed(kRanks, Floats(kEntries));
  for (int s = 0; s < kLawSteps; ++s) {
    const auto gradients =
        gradients_of(kRanks, s, [](int r, int step) { return integers(r, step, kEntries); });
    Floats sum(kEntries);
    for (std::size_t r = 0; r < kRanks; ++r) {
      std::vector<std::size_t> order(kEntries);
      std::iota(order.begin(), order.end(), std::size_t{0});
      for (std::size_t i = 0; i < kEntries; ++i) owed[r][i] += gradients[r][i];
      std::ranges::stable_sort(order, std::greater<>(),
                               [&](std::size_t i) { return std::abs(owed[r][i]); });
      for (const std::size_t i : std::span(order).first(k)) sum[i] += std::exchange(owed[r][i], 0);
    }
    for (float& x : sum) x /= kRanks;
    const auto outcomes = cluster.step(gradients, one_bucket(cluster[0].layout()));
    ASSERT_TRUE(same_bits(outcomes[0].gradient, sum)) << "step " << s;
    for (std::size_t r = 0; r < kRanks; ++r) {
      ASSERT_TRUE(same_bits(outcomes[r].owed, owed[r])) << "step " << s;
    }
  }
}

}  // namespace
}  // namespace topreduce::laws
