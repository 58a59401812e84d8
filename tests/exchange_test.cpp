// Adding up over the ranks: what the laws of reducer_test.cpp do not show. randk draws exactly k
// places, each as likely as the next; the Adder sums in rank order.

#include "topreduce/exchange/exchange.h"

#include <cmath>
#include <map>
#include <set>

#include "cluster.h"
#include "topreduce/comm/self.h"
#include "topreduce/random.h"
#include "topreduce/reducer.h"

namespace topreduce::laws {
namespace {

// ---- randk -------------------------------------------------------------------------------------

/// randk of a model of ones: the places that were drawn are those that are not zero afterwards.
Spec randk(std::size_t k, std::size_t n, const char* seed = "0") {
  const double density = static_cast<double>(k) / static_cast<double>(n);
  return {"randk", {{"density", std::to_string(density)}, {"feedback", "none"}, {"seed", seed}}};
}

std::set<std::size_t> drawn(Reducer& reducer, const Cut& cut) {
  comm::Self comm;
  std::set<std::size_t> places;
  std::vector<Floats> buckets;
  for (const auto& bucket : cut) {
    std::size_t size = 0;
    for (const std::size_t id : bucket) size += reducer.layout()[id].size;
    buckets.emplace_back(size, 1.0f);
  }
  reducer.begin(comm);
  for (std::size_t b = 0; b < cut.size(); ++b) reducer.add(cut[b], buckets[b]);
  reducer.finish();
  for (std::size_t b = 0; b < cut.size(); ++b) {
    const float* next = buckets[b].data();
    for (const std::size_t id : cut[b]) {
      const Parameter& parameter = reducer.layout()[id];
      for (std::size_t i = 0; i < parameter.size; ++i) {
        if (*next++ != 0) places.insert(parameter.offset + i);
      }
    }
  }
  return places;
}

TEST(RandK, DrawsExactlyKWhateverTheBuckets) {
  const Layout layout = small_model();
  const std::size_t n = layout.size();
  for (const std::size_t k : {std::size_t{1}, n / 50, n / 3, n / 2 + 7, n - 1, n}) {
    std::vector<Reducer> reducers;
    for (std::size_t i = 0; i < 4; ++i) reducers.emplace_back(layout, randk(k, n));
    for (int step = 0; step < 20; ++step) {
      const auto first = drawn(reducers[0], all_cuts(layout)[0]);
      ASSERT_EQ(first.size(), k) << "step " << step;
      for (std::size_t i = 1; i < 4; ++i) {
        ASSERT_EQ(drawn(reducers[i], all_cuts(layout)[i]), first) << "step " << step;
      }
    }
  }
}

TEST(RandK, DrawsEveryPlaceEquallyOften) {
  constexpr std::size_t n = 60;
  constexpr int kDraws = 2000;
  const Layout layout({{"a", {13}}, {"b", {n - 13}}});
  for (const std::size_t k : {std::size_t{3}, std::size_t{10}, std::size_t{41}}) {
    Reducer reducer(layout, randk(k, n));
    std::vector<int> counts(n);
    int together = 0;  // the first two places at once
    for (int step = 0; step < kDraws; ++step) {
      const auto places = drawn(reducer, one_bucket(layout));
      for (const std::size_t place : places) ++counts[place];
      together += places.contains(0) && places.contains(1) ? 1 : 0;
    }
    const double probability = static_cast<double>(k) / n;
    const double expected = kDraws * probability;
    double chi_square = 0;
    for (const int count : counts) {
      chi_square += (count - expected) * (count - expected) / (expected * (1 - probability));
    }
    // About n on average, with a deviation of sqrt(2 n).
    EXPECT_LT(chi_square, n + 5 * std::sqrt(2.0 * n)) << "k = " << k;
    EXPECT_GT(chi_square, n - 5 * std::sqrt(2.0 * n)) << "k = " << k;
    EXPECT_LT(together, kDraws * probability) << "k = " << k;
  }
}

TEST(RandK, DrawsAnewEachStepAndForEachSeed) {
  const Layout layout = one_parameter(1000);
  Reducer one(layout, randk(10, 1000, "1")), two(layout, randk(10, 1000, "2"));
  const auto first = drawn(one, {{0}});
  EXPECT_NE(drawn(one, {{0}}), first);
  EXPECT_NE(drawn(two, {{0}}), first);
}

TEST(RandK, DrawsTheSameOnAllRanks) {
  const Layout layout = one_parameter(1000);
  Cluster cluster(3, layout, randk(50, 1000));
  std::vector<Floats> gradients(3, Floats(1000));
  for (std::size_t r = 0; r < 3; ++r) std::ranges::fill(gradients[r], static_cast<float>(r + 1));
  for (int step = 0; step < 5; ++step) {
    const auto outcomes = cluster.step(gradients, one_bucket(layout));
    EXPECT_EQ(std::ranges::count(outcomes[0].gradient, 2.0f), 50);  // (1 + 2 + 3) / 3: all or none
    EXPECT_EQ(std::ranges::count(outcomes[0].gradient, 0.0f), 950);
  }
}

// ---- random numbers ----------------------------------------------------------------------------

// The known answers of its authors: zeros, ones, and the digits of pi.
TEST(RandomStream, IsPhilox) {
  using Purpose = RandomStream::Purpose;
  EXPECT_EQ(RandomStream(0, 0, Purpose{0})(0), 0xe169c58d6627e8d5u);
  EXPECT_EQ(RandomStream(~0ull, ~0ull, Purpose{~0u})(~0u), 0x41c83b0e408f276du);
  EXPECT_EQ(
      RandomStream(0x299f31d0a4093822u, 0x0370734413198a2eu, Purpose{0x85a308d3u})(0x243f6a88),
      0x94fdccebd16cfe09u);
}

// ---- Adder -------------------------------------------------------------------------------------

SparseVector random_part(std::mt19937& rng, Index universe, unsigned one_in) {
  std::normal_distribution<float> normal;
  SparseVector part;
  for (Index i = 0; i < universe; ++i) {
    if (rng() % one_in == 0) part.push_back(i, normal(rng) * std::exp(5 * normal(rng)));
  }
  return part;
}

TEST(Adder, AddsInTheOrderOfTheParts) {
  Adder adder;
  SparseVector sum;
  auto rng = rng_of(0, 0);
  for (const Index universe : {0u, 1u, 63u, 64u, 65u, 32768u, 100'001u}) {
    for (const unsigned one_in : {1u, 3u, 1000u}) {
      std::vector<SparseVector> parts(5);
      for (SparseVector& part : parts) part = random_part(rng, universe, one_in);
      parts[2].clear();
      std::map<Index, float> expected;
      for (const SparseVector& part : parts) {
        for (std::size_t i = 0; i < part.size(); ++i) {
          const auto [entry, fresh] = expected.try_emplace(part.indices[i], part.values[i]);
          if (!fresh) entry->second += part.values[i];
        }
      }
      adder.add(parts, universe, sum);
      ASSERT_EQ(sum.size(), expected.size());
      std::size_t i = 0;
      for (const auto& [index, value] : expected) {
        ASSERT_EQ(sum.indices[i], index);
        ASSERT_EQ(std::bit_cast<std::uint32_t>(sum.values[i]), std::bit_cast<std::uint32_t>(value));
        ++i;
      }
    }
  }
}

TEST(Adder, KeepsEntriesThatCancel) {
  std::vector<SparseVector> parts(2);
  parts[0].push_back(7, 1.5f);
  parts[1].push_back(7, -1.5f);
  Adder adder;
  SparseVector sum;
  adder.add(parts, 10, sum);
  ASSERT_EQ(sum.size(), 1);
  EXPECT_EQ(sum.indices[0], 7);
  EXPECT_EQ(sum.values[0], 0);
  adder.add({}, 10, sum);
  EXPECT_TRUE(sum.empty());
}

}  // namespace
}  // namespace topreduce::laws
