// Choosing alone: topk is exact, carried keeps to its budget whatever the gradients do.

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "laws.h"
#include "topreduce/catalog.h"
#include "topreduce/comm/self.h"
#include "topreduce/reducer.h"
#include "topreduce/select/sample.h"
#include "topreduce/select/selector.h"

namespace topreduce::select {
namespace {

using laws::Cut;
using laws::Floats;

/// A selector and the model it chooses from, without a Reducer around it.
class Chooser {
 public:
  Chooser(const char* name, Layout layout, std::size_t k)
      : layout_(std::move(layout)),
        selector_(find_select(name).make({name, find_select(name).settings, {}}, layout_)) {
    budget_ = {0, 0, k, layout_.size()};
  }

  /// One step without memory. Returns the chosen places in the flat model, ascending.
  std::vector<std::size_t> choose(Floats gradient, const Cut& cut) {
    std::vector<std::size_t> chosen;
    selector_->begin(budget_);
    for (std::vector<std::size_t> bucket : cut) {
      std::ranges::sort(bucket);
      std::vector<Segment> segments;
      Index start = 0;
      for (const std::size_t id : bucket) {
        const auto [name, shape, size, offset] = layout_[id];
        segments.push_back({.parameter = id,
                            .start = start,
                            .offset = offset,
                            .count = size,
                            .gradient = std::span(gradient).subspan(offset, size)});
        start += static_cast<Index>(size);
      }
      SparseVector selected;
      kernels::Summary summary;
      double seconds = 0;
      selector_->choose(CompensatedGradient(segments, {}, 1), selected, summary, seconds);
      EXPECT_TRUE(summary.finite());
      EXPECT_TRUE(std::ranges::is_sorted(selected.indices, std::less_equal<>()));
      for (std::size_t i = 0, s = 0; i < selected.size(); ++i) {
        while (selected.indices[i] - segments[s].start >= segments[s].size()) ++s;
        chosen.push_back(segments[s].offset + (selected.indices[i] - segments[s].start));
        EXPECT_EQ(selected.values[i], gradient[chosen.back()]);
      }
    }
    selector_->commit();
    ++budget_.step;
    std::ranges::sort(chosen);
    return chosen;
  }

  std::vector<std::size_t> choose(Floats gradient) {
    return choose(std::move(gradient), laws::one_bucket(layout_));
  }

 private:
  Layout layout_;
  std::unique_ptr<Selector> selector_;
  Budget budget_;
};

/// The k largest magnitudes but zeros, ties to the lower index.
std::vector<std::size_t> plain_topk(const Floats& values, std::size_t k) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::greater<>(),
                           [&](std::size_t i) { return std::abs(values[i]); });
  order.resize(std::min(k, order.size()));
  std::erase_if(order, [&](std::size_t i) { return values[i] == 0; });
  std::ranges::sort(order);
  return order;
}

// ---- topk --------------------------------------------------------------------------------------

struct Family {
  const char* name;
  float (*value)(int step, std::mt19937& rng);
};

float normal(std::mt19937& rng) {
  return std::normal_distribution<float>()(rng);
}

// Last step's cut helps on some of these, is far off on others, and finds nothing on the rest.
const Family kFamilies[] = {
    {"Normal", [](int, std::mt19937& rng) { return normal(rng); }},
    {"HeavyTailed", [](int, std::mt19937& rng) { return normal(rng) * std::exp(normal(rng)); }},
    {"Integers", [](int, std::mt19937& rng) { return static_cast<float>(rng() % 17) - 8; }},
    {"Tied", [](int, std::mt19937& rng) { return rng() % 2 == 0 ? 1.0f : -1.0f; }},
    {"AllEqual", [](int step, std::mt19937&) { return static_cast<float>(step); }},
    {"JumpsUpAndDown",
     [](int step, std::mt19937& rng) { return normal(rng) * (step % 2 == 0 ? 1.0f : 100.0f); }},
    {"Shrinks",
     [](int step, std::mt19937& rng) { return normal(rng) * std::ldexp(1.0f, -3 * step); }},
    {"SometimesSparse",
     [](int step, std::mt19937& rng) {
       const float x = normal(rng);
       return step % 3 == 2 && rng() % 1000 != 0 ? 0.0f : x;
     }},
    {"Denormal", [](int, std::mt19937& rng) { return normal(rng) * 1e-41f; }},
};

class TopKQuality : public testing::TestWithParam<Family> {};

INSTANTIATE_TEST_SUITE_P(Families, TopKQuality, testing::ValuesIn(kFamilies),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(TopKQuality, EqualsAPlainSort) {
  const struct {
    std::size_t n, k;
  } sizes[] = {{1, 1}, {7, 3}, {1000, 10}, {1000, 999}, {50'000, 500}, {140'000, 200}};
  for (const auto [n, k] : sizes) {
    Chooser chooser("topk", laws::one_parameter(n), k);
    auto rng = laws::rng_of(0, 0);
    for (int step = 0; step < 6; ++step) {
      Floats values(n);
      for (float& x : values) x = GetParam().value(step, rng);
      ASSERT_EQ(chooser.choose(values), plain_topk(values, k)) << n << " entries, step " << step;
    }
  }
}

// Every third entry is large, and a model of this size is sampled at every third place: the sample
// promises three times as many large ones as there are.
TEST(TopK, IsExactWhereTheSampleMisleads) {
  constexpr std::size_t n = 140'000, k = 60'000;
  auto rng = laws::rng_of(0, 0);
  Floats values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = normal(rng) + (i % 3 == 0 ? 100.0f : 0.0f);
  Chooser chooser("topk", laws::one_parameter(n), k);
  EXPECT_EQ(chooser.choose(values), plain_topk(values, k));
}

// ---- carried -----------------------------------------------------------------------------------

constexpr std::size_t kBudget = 300;

/// 30 000 entries in parameters of very different size.
Layout carried_model() {
  return Layout({{"embed", {100, 100}}, {"bias", {3}}, {"body", {190, 100}}, {"head", {997}}});
}

/// Entries sent per step, with memory or without.
class Counter {
 public:
  explicit Counter(const char* feedback)
      : layout_(carried_model()),
        reducer_(layout_, {"topk", {{"density", "0.01"}, {"feedback", feedback}}}) {}

  double step(float scale, Floats* mean = nullptr) {
    Floats gradient = laws::heavy_tailed(0, step_++, layout_);
    for (float& x : gradient) x *= scale;
    reducer_.begin(comm_);
    const auto cut = laws::one_bucket(layout_);
    reducer_.add(cut[0], gradient);
    const auto count = static_cast<double>(reducer_.finish().selected);
    EXPECT_LE(count, 3 * kBudget) << "step " << step_;
    if (mean != nullptr) *mean = gradient;
    return count;
  }

 private:
  Layout layout_;
  Reducer reducer_;
  comm::Self comm_;
  int step_ = 0;
};

class CarriedQuality : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Feedbacks, CarriedQuality, testing::Values("none", "residual"),
                         [](const auto& test) { return std::string(test.param); });

// Within 5 steps of whatever happened, the count is within a factor of 2 of the budget and stays.
TEST_P(CarriedQuality, RecoversWithinFiveSteps) {
  Counter counter(GetParam());
  const auto expect_recovery = [&](const char* from, float scale) {
    for (int s = 0; s < 4; ++s) counter.step(scale);
    for (int s = 4; s < 24; ++s) {
      const double count = counter.step(scale);
      EXPECT_GE(count, 0.5 * kBudget) << s << " steps after " << from;
      EXPECT_LE(count, 2 * kBudget) << s << " steps after " << from;
    }
  };
  expect_recovery("the start", 1);
  expect_recovery("a jump up", 100);
  expect_recovery("a jump down", 1);
  counter.step(0);
  expect_recovery("an all-zero step", 1);
  for (int s = 0; s < 20; ++s) counter.step(0);
  expect_recovery("many all-zero steps", 1);
  counter.step(1e6f);
  expect_recovery("a single huge step", 1);
  expect_recovery("a jump to almost nothing", 1e-6f);
}

TEST_P(CarriedQuality, MeetsTheBudgetOnAverage) {
  Counter counter(GetParam());
  double sum = 0;
  for (int s = 0; s < 200; ++s) sum += counter.step(1);
  EXPECT_NEAR(sum / 200, kBudget, 0.15 * kBudget);
}

// Entries of the same scale are sent equally often, also where a parameter's share of the budget is
// a small part of one entry.
TEST_P(CarriedQuality, SmallParametersDoNotStarve) {
  const Layout layout({{"large", {4000}}, {"bias", {3}}, {"other", {2000}}});
  Reducer reducer(layout, {"topk", {{"density", "0.01"}, {"feedback", GetParam()}}});
  comm::Self comm;
  auto rng = laws::rng_of(1, 1);
  int sent = 0;
  for (int s = 0; s < 500; ++s) {
    Floats gradient(layout.size());
    for (float& x : gradient) x = normal(rng);
    reducer.begin(comm);
    reducer.add(laws::one_bucket(layout)[0], gradient);
    reducer.finish();
    sent += static_cast<int>(std::count_if(gradient.begin() + 4000, gradient.begin() + 4003,
                                           [](float x) { return x != 0; }));
  }
  EXPECT_GE(sent, 4);  // of 15 that are fair
  EXPECT_LE(sent, 45);
}

TEST(Carried, DoesNotSeeTheBucketCut) {
  const Layout layout = carried_model();
  std::vector<Chooser> choosers;
  const auto cuts = laws::all_cuts(layout);
  for (std::size_t i = 0; i < cuts.size(); ++i) choosers.emplace_back("carried", layout, kBudget);
  for (int s = 0; s < 30; ++s) {
    Floats gradient = laws::heavy_tailed(0, s, layout);
    if (s % 10 == 5) {
      for (float& x : gradient) x *= 100;  // caps decide
    }
    const auto first = choosers[0].choose(gradient, cuts[0]);
    for (std::size_t i = 1; i < cuts.size(); ++i) {
      ASSERT_EQ(choosers[i].choose(gradient, cuts[i]), first) << "step " << s << ", cut " << i;
    }
  }
}

TEST(Carried, SendsEverythingWithABudgetForEverything) {
  const Layout layout = carried_model();
  Chooser chooser("carried", layout, layout.size());
  for (int s = 0; s < 5; ++s) {
    EXPECT_EQ(chooser.choose(laws::heavy_tailed(0, s, layout)).size(), layout.size());
  }
}

// ---- sample ------------------------------------------------------------------------------------

TEST(Sample, CannotTellWithoutPlaces) {
  Sample sample;
  sample.begin(3, 100);
  const Floats values = {1, -3, 2};
  sample.take(0, {{}, values, 1});
  EXPECT_EQ(sample.kth_magnitude(1, 0), 3);
  EXPECT_EQ(sample.kth_magnitude(3, 0), 1);
  EXPECT_EQ(sample.kth_magnitude(4, 0), 0);
  sample.begin(0, 100);  // an empty model
  EXPECT_EQ(sample.kth_magnitude(0, 0), 0);
}

TEST(Sample, IsNearTheTruth) {
  const Floats values = laws::heavy_tailed(0, 0, laws::one_parameter(100'000));
  Sample sample;
  sample.begin(values.size(), 1 << 13);
  // In two stretches, the second first: the places are those of the whole.
  sample.take(33'333, {{}, std::span(values).subspan(33'333), 1});
  sample.take(0, {{}, std::span(values).first(33'333), 1});
  const float truth = kernels::kth_magnitude(values, 1000);
  EXPECT_NEAR(sample.kth_magnitude(1000, 0), truth, 0.2f * truth);
  EXPECT_LT(sample.kth_magnitude(1000, 4), truth);
}

}  // namespace
}  // namespace topreduce::select
