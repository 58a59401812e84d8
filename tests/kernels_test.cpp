// Every kernel on every instruction set of this machine equals its scalar reference.

#include "topreduce/kernels/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "sanitized.h"

namespace topreduce::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kDenormal = std::numeric_limits<float>::denorm_min();
constexpr float kLargest = std::numeric_limits<float>::max();

// 0.3 is there because its products are not exact: a fused multiply-add would show.
constexpr float kScales[] = {1, 0.5f, -2, 0.3f};

std::vector<std::size_t> sizes() {
  std::vector<std::size_t> all(71);
  std::iota(all.begin(), all.end(), std::size_t{0});
  all.insert(all.end(), {511, 513, 1023, 4099, 16384});
  if (!kSanitized) all.push_back(100003);  // shows it nothing that short vectors do not
  return all;
}

std::vector<float> heavy_tailed(std::size_t n, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& value : x) value = normal(rng) * std::exp(0.7f * normal(rng));
  return x;
}

// Replaces a few entries with everything that is awkward, of both signs.
void add_oddities(std::vector<float>& x, unsigned seed) {
  constexpr float kOdd[] = {0.0f, kInfinity, kNaN, kDenormal, 1e-40f, kLargest, 1e-30f};
  std::mt19937 rng(seed);
  for (float& value : x) {
    if (rng() % 5 == 0) value = std::copysign(kOdd[rng() % std::size(kOdd)], value);
  }
}

// Same bits; a NaN equals every NaN, because which of two survives an addition is not defined.
void expect_same(std::span<const float> got, std::span<const float> want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(want[i]) && std::isnan(got[i])) continue;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(got[i]), std::bit_cast<std::uint32_t>(want[i]))
        << "entry " << i << " of " << got.size() << ": " << got[i] << " and " << want[i];
  }
}

void expect_same(const Summary& got, const Summary& want) {
  EXPECT_EQ(got.largest_bits, want.largest_bits);
  EXPECT_EQ(got.finite(), want.finite());
  if (want.finite()) {
    EXPECT_NEAR(got.energy, want.energy, 1e-5 * want.energy);
  }
}

struct Collected {
  explicit Collected(std::size_t n) : indices(n + kCollectSlack), values(n + kCollectSlack) {}
  void shrink(std::size_t count) {
    indices.resize(count);
    values.resize(count);
  }
  std::vector<Index> indices;
  std::vector<float> values;
};

void expect_same_look(const Terms& terms, float threshold) {
  constexpr Index kFirst = 1000;
  Collected got(terms.size());
  Collected want(terms.size());
  // Passes add to what was seen before.
  Summary got_seen{3, 7};
  Summary want_seen{3, 7};
  got.shrink(
      collect_above(terms, threshold, kFirst, got.indices.data(), got.values.data(), got_seen));
  want.shrink(scalar::collect_above(terms, threshold, kFirst, want.indices.data(),
                                    want.values.data(), want_seen));
  EXPECT_EQ(got.indices, want.indices);
  expect_same(got.values, want.values);
  expect_same(got_seen, want_seen);

  EXPECT_EQ(count_above(terms, threshold), want.indices.size());
  EXPECT_EQ(scalar::count_above(terms, threshold), want.indices.size());

  Summary surveyed{3, 7};
  summarize(terms, surveyed);
  expect_same(surveyed, want_seen);
}

class Kernels : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { use_target(GetParam()); }
  void TearDown() override { use_target(""); }

  // Calls body(base, gradient, scale) for all sizes, with and without a base, aligned and not.
  template <class Body>
  void for_each_case(Body body) {
    for (const std::size_t n : sizes()) {
      for (const unsigned kind : {0u, 1u}) {
        auto base = heavy_tailed(n + 1, 1);
        auto gradient = heavy_tailed(n + 1, 2);
        if (kind == 1) {
          add_oddities(base, 3);
          add_oddities(gradient, 4);
        }
        for (const std::size_t offset : {0u, 1u}) {
          for (const float scale : kScales) {
            SCOPED_TRACE(testing::Message() << "n " << n << " kind " << kind << " offset " << offset
                                            << " scale " << scale);
            body(std::span(base).subspan(offset, n), std::span(gradient).subspan(offset, n), scale);
            body(std::span<float>(), std::span(gradient).subspan(offset, n), scale);
            if (HasFatalFailure() || HasNonfatalFailure()) return;
          }
        }
      }
    }
  }
};

TEST_P(Kernels, LookLikeTheReference) {
  for_each_case([](std::span<float> base, std::span<float> gradient, float scale) {
    const Terms terms{base, gradient, scale};
    for (const float threshold : {0.0f, 1.0f, 6.0f, kInfinity, kNaN, -1.0f}) {
      expect_same_look(terms, threshold);
    }
    if (terms.size() > 0) expect_same_look(terms, std::abs(terms[terms.size() / 2]));
  });
}

TEST_P(Kernels, ThresholdIsInclusiveAtEveryPlace) {
  constexpr std::size_t n = 600;
  for (std::size_t place = 0; place < n; ++place) {
    std::vector<float> x(n, std::nextafter(2.5f, 0.0f));
    x[place] = -2.5f;
    Collected got(n);
    Summary summary;
    const Terms terms{{}, x, 1};
    ASSERT_EQ(collect_above(terms, 2.5f, 0, got.indices.data(), got.values.data(), summary), 1u);
    EXPECT_EQ(got.indices[0], place);
    EXPECT_EQ(got.values[0], -2.5f);
    EXPECT_EQ(count_above(terms, 2.5f), 1u);
  }
}

TEST_P(Kernels, SeeOneValueThatIsNotFinite) {
  for (const float odd : {kInfinity, -kInfinity, kNaN, -kNaN}) {
    for (std::size_t place = 0; place < 600; ++place) {
      std::vector<float> x(600, kLargest);
      Summary summary;
      summarize({{}, x, 1}, summary);
      ASSERT_TRUE(summary.finite());
      x[place] = odd;
      summarize({{}, x, 1}, summary);
      ASSERT_FALSE(summary.finite()) << odd << " at " << place;
    }
  }
}

// Squares of these leave the range of float.
TEST_P(Kernels, EnergyOfExtremeValues) {
  for (const float value : {kLargest, 1e25f, 1e19f, 1e-15f, 1e-20f, 1e-25f, 1e-38f, kDenormal}) {
    std::vector<float> x(5000);
    for (std::size_t i = 0; i < x.size(); i += 3) x[i] = value;
    Summary got;
    Summary want;
    summarize({{}, x, 1}, got);
    scalar::summarize({{}, x, 1}, want);
    ASSERT_GT(want.energy, 0) << value;
    ASSERT_NEAR(got.energy, want.energy, 1e-5 * want.energy) << value;
  }
}

// In float alone this sum would stop growing long before the end.
TEST_P(Kernels, EnergyOfManyEntries) {
  constexpr std::size_t n = std::size_t{1} << 20;
  const std::vector<float> x(n, 1.1f);
  Summary summary;
  const int passes = kSanitized ? 2 : 100;
  for (int pass = 0; pass < passes; ++pass) summarize({{}, x, 1}, summary);
  const double want = 1.0 * passes * n * static_cast<double>(1.1f) * static_cast<double>(1.1f);
  EXPECT_NEAR(summary.energy, want, 1e-5 * want);
}

TEST_P(Kernels, EvaluateLikeTheReference) {
  for_each_case([](std::span<float> base, std::span<float> gradient, float scale) {
    const Terms terms{base, gradient, scale};
    std::vector<float> got(terms.size());
    std::vector<float> want(terms.size());
    evaluate(terms, got);
    scalar::evaluate(terms, want);
    expect_same(got, want);
  });
}

TEST_P(Kernels, ProjectLikeTheReference) {
  std::vector<float> directions;
  for_each_case([&](std::span<float> base, std::span<float> gradient, float scale) {
    const Terms terms{base, gradient, scale};
    const std::size_t stride = terms.size() + 3;
    if (directions.size() < 9 * stride) directions = heavy_tailed(9 * stride, 5);
    for (const std::size_t count : {1u, 2u, 4u, 9u}) {
      std::vector<float> got(count), want(count);
      project(terms, directions.data(), stride, got);
      scalar::project(terms, directions.data(), stride, want);
      expect_same(got, want);
    }
  });
}

// Every sum to the bit.
TEST_P(Kernels, MomentsLikeTheReference) {
  for_each_case([](std::span<float> base, std::span<float> gradient, float scale) {
    const Terms terms{base, gradient, scale};
    const Moments got = moments(terms), want = scalar::moments(terms);
    const auto same = [](double a, double b) {
      return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b) ||
             (std::isnan(a) && std::isnan(b));
    };
    EXPECT_TRUE(same(got.sum, want.sum)) << got.sum << " and " << want.sum;
    EXPECT_TRUE(same(got.magnitudes, want.magnitudes));
    EXPECT_TRUE(same(got.squares, want.squares));
  });
  const std::vector<float> x = {1, -2, 0.5f};
  const Moments sums = moments({{}, x, 2});
  EXPECT_EQ(sums.sum, -1);
  EXPECT_EQ(sums.magnitudes, 7);
  EXPECT_EQ(sums.squares, 21);
}

TEST_P(Kernels, AbsorbLikeTheReference) {
  for_each_case([](std::span<float> base, std::span<float> gradient, float scale) {
    // Copies with a guard on each side, which must stay.
    const auto guarded = [](std::span<const float> x) {
      std::vector<float> copy(x.size() + 2, 77);
      std::ranges::copy(x, copy.begin() + 1);
      return copy;
    };
    auto got_base = guarded(base);
    auto got_gradient = guarded(gradient);
    auto want_base = got_base;
    auto want_gradient = got_gradient;
    absorb(std::span(got_base).subspan(1, base.size()),
           std::span(got_gradient).subspan(1, gradient.size()), scale);
    scalar::absorb(std::span(want_base).subspan(1, base.size()),
                   std::span(want_gradient).subspan(1, gradient.size()), scale);
    expect_same(got_base, want_base);
    expect_same(got_gradient, want_gradient);
    EXPECT_TRUE(std::all_of(got_gradient.begin() + 1, got_gradient.end() - 1,
                            [](float x) { return std::bit_cast<std::uint32_t>(x) == 0; }));
  });
}

TEST_P(Kernels, AbsorbAndSaveLikeTheReference) {
  for_each_case([](std::span<float> base, std::span<float> gradient, float scale) {
    if (base.empty()) return;
    std::vector<float> got_base(base.begin(), base.end()), want_base = got_base;
    std::vector<float> got_gradient(gradient.begin(), gradient.end()), want_gradient = got_gradient;
    const std::uint32_t got = absorb_and_save(got_base, got_gradient, scale);
    EXPECT_EQ(got, scalar::absorb_and_save(want_base, want_gradient, scale));
    expect_same(got_base, want_base);
    expect_same(got_gradient, want_gradient);
    expect_same(got_gradient, std::vector<float>(base.begin(), base.end()));
    Summary of_gradients;
    scalar::summarize({{}, gradient, scale}, of_gradients);
    EXPECT_EQ(got, of_gradients.largest_bits);
  });
}

TEST_P(Kernels, AddLikeTheReference) {
  for_each_case([](std::span<float> base, std::span<float> gradient, float) {
    const auto part = gradient.first(base.size());
    std::vector<float> got(base.begin(), base.end());
    std::vector<float> want = got;
    add(got, part);
    scalar::add(want, part);
    expect_same(got, want);
  });
}

void expect_kth(const std::vector<float>& values) {
  std::vector<float> magnitudes(values.size());
  std::ranges::transform(values, magnitudes.begin(), [](float x) { return std::abs(x); });
  const std::size_t n = values.size();
  for (const std::size_t k : {std::size_t{1}, (n + 1) / 2, n - n / 10, n}) {
    const auto kth = magnitudes.begin() + static_cast<std::ptrdiff_t>(k - 1);
    std::nth_element(magnitudes.begin(), kth, magnitudes.end(), std::greater<>());
    ASSERT_EQ(kth_magnitude(values, k), *kth) << "k " << k << " of " << n;
    ASSERT_EQ(scalar::kth_magnitude(values, k), *kth) << "k " << k << " of " << n;
  }
}

TEST_P(Kernels, KthMagnitudeIsExact) {
  for (const std::size_t n : sizes()) {
    if (n == 0) continue;
    const auto heavy = heavy_tailed(n, 5);
    std::mt19937 rng(6);
    std::vector<float> equal(n, -3.25f);
    std::vector<float> tied(n);
    std::vector<float> denormal(n);
    std::vector<float> wide(n);
    std::vector<float> outlier(n, 1.0f);
    for (float& x : tied) x = static_cast<float>(static_cast<int>(rng() % 7) - 3);
    // Uniform in the bits: all magnitudes below the limit are equally likely.
    const auto any_below = [&](std::uint32_t limit) {
      return std::bit_cast<float>(std::uniform_int_distribution<std::uint32_t>(0, limit - 1)(rng));
    };
    for (float& x : denormal) x = -any_below(0x00800000u);
    for (float& x : wide) x = any_below(0x7f800000u);
    outlier[n / 2] = kLargest;
    outlier[n / 3] = -0.0f;
    for (const auto& values : {heavy, equal, tied, denormal, wide, outlier}) expect_kth(values);
  }
}

INSTANTIATE_TEST_SUITE_P(EveryTarget, Kernels, testing::ValuesIn(targets()),
                         [](const auto& row) { return std::string(row.param); });

TEST(Targets, UnknownNamesAreRefused) {
  EXPECT_THROW(use_target("abacus"), std::invalid_argument);
}

TEST(Kernels, SumsAreTakenAsByTheScalarReference) {
  std::mt19937 rng(6);
  for (const char* target : targets()) {
    SCOPED_TRACE(target);
    use_target(target);
    for (const std::size_t n : sizes()) {
      for (const unsigned one_in : {1u, 2u, 5u, 100u, 3000u}) {
        std::vector<std::uint8_t> flags(n), same_flags;
        std::vector<float> sums(n, kNothing), same_sums;
        for (std::size_t i = 0; i < n; ++i) {
          if (rng() % one_in != 0) continue;
          flags[i] = 1;
          sums[i] = static_cast<float>(rng()) - 0x1p31f;
        }
        same_flags = flags;
        same_sums = sums;
        std::vector<Index> indices(n + kTakeSlack), same_indices(n);
        std::vector<float> values(n + kTakeSlack), same_values(n);
        const std::size_t count = scalar::take_sums(same_flags, same_sums.data(), 5,
                                                    same_indices.data(), same_values.data());
        ASSERT_EQ(take_sums(flags, sums.data(), 5, indices.data(), values.data()), count);
        ASSERT_EQ(flags, same_flags);
        expect_same(sums, same_sums);
        ASSERT_TRUE(std::equal(same_indices.begin(),
                               same_indices.begin() + static_cast<std::ptrdiff_t>(count),
                               indices.begin()));
        expect_same(std::span(values).first(count), std::span(same_values).first(count));
      }
    }
  }
  use_target("");
}

}  // namespace
}  // namespace topreduce::kernels
