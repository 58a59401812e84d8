// Published thresholds (gaussiank, dgc, redsync): how many entries they choose of which vectors, as
// the papers and measurements of the authors' code have it.

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "cluster.h"
#include "topreduce/catalog.h"
#include "topreduce/comm/self.h"

namespace topreduce::laws {
namespace {

constexpr std::size_t kPlaces = 1'000'000, kWanted = 1000;

using Draw = std::function<double(std::size_t, std::mt19937&)>;

double normal(std::mt19937& rng) {
  return std::normal_distribution<double>()(rng);
}

double student(int degrees, std::mt19937& rng) {
  double squares = 0;
  const double x = normal(rng);
  for (int i = 0; i < degrees; ++i) {
    const double y = normal(rng);
    squares += y * y;
  }
  return x / std::sqrt(squares / degrees);
}

// Vectors of the comparison, and the counts in units of k: at the first guess of gaussiank, of
// gaussiank, of redsync's binary and of its trimmed search. -1: rests on the largest of all, so on
// luck; python/tests/test_reference.py has those.
struct Shape {
  const char* name;
  Draw draw;
  double first, gaussian, binary, trimmed;
};

const Shape kShapes[] = {
    {"normal", [](std::size_t, std::mt19937& rng) { return normal(rng); }, 1.0, 1.0, -1, -1},
    {"laplace",
     [](std::size_t, std::mt19937& rng) {
       return std::exponential_distribution<double>()(rng) * (rng() % 2 == 0 ? 1 : -1);
     },
     9.6, 0.90, -1, -1},
    {"student_5", [](std::size_t, std::mt19937& rng) { return student(5, rng); }, 8.1, 0.21, -1,
     386},
    {"student_3", [](std::size_t, std::mt19937& rng) { return student(3, rng); }, 10.5, 1.03, -1,
     351},
    {"layers",
     [](std::size_t i, std::mt19937& rng) {
       return normal(rng) * std::pow(10, -3 * static_cast<double>(i * 50 / kPlaces) / 49);
     },
     22, 1.31, -1, -1},
    {"log_normal",
     [](std::size_t, std::mt19937& rng) { return normal(rng) * std::exp(1.5 * normal(rng)); }, 9.6,
     2.23, -1, -1},
    {"zeros", [](std::size_t, std::mt19937& rng) { return rng() % 10 == 0 ? normal(rng) : 0.0; },
     30, 1.88, -1, -1},
    {"uniform",
     [](std::size_t, std::mt19937& rng) { return static_cast<double>(rng()) * 0x1p-31 - 1; }, 0, 0,
     62, 100},
    {"equal",
     [](std::size_t, std::mt19937& rng) {
       return (1 + 1e-6 * normal(rng)) * (rng() % 2 == 0 ? 1 : -1);
     },
     0, 1000, -1, -1},
};

Floats vector_of(const Shape& shape) {
  std::mt19937 rng(1);
  Floats values(kPlaces);
  for (std::size_t i = 0; i < kPlaces; ++i) values[i] = static_cast<float>(shape.draw(i, rng));
  return values;
}

/// Entries chosen in one step without a memory, in units of the budget.
double chosen(const std::string& select, const Floats& values, const char* density = "0.001") {
  Reducer reducer(
      one_parameter(values.size()),
      {"topk",
       {{"density", density}, {"granularity", "model"}, {"feedback", "none"}, {"select", select}}});
  comm::Self comm;
  Floats gradient = values;
  const std::size_t ids[] = {0};
  reducer.begin(comm);
  reducer.add(ids, gradient);
  const StepStats& stats = reducer.finish();
  return static_cast<double>(stats.selected) / static_cast<double>(stats.budget);
}

// Within the error of drawing: of the count itself, and of the deviation that the threshold rests
// on, which heavy tails leave uncertain.
void expect_count(const char* what, double got, double want) {
  if (want < 0) return;
  EXPECT_NEAR(got, want, 0.02 + 0.25 * want + 4 * std::sqrt(want / kWanted)) << what;
}

class RulesQuality : public testing::TestWithParam<Shape> {};

INSTANTIATE_TEST_SUITE_P(Shapes, RulesQuality, testing::ValuesIn(kShapes),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(RulesQuality, CountAsThePublishedCode) {
  const Shape& shape = GetParam();
  const Floats values = vector_of(shape);
  expect_count("first guess", chosen("gaussiank:evaluations=1", values), shape.first);
  expect_count("gaussiank", chosen("gaussiank", values), shape.gaussian);
  expect_count("redsync", chosen("redsync", values), shape.binary);
  expect_count("trimmed", chosen("redsync:search=trimmed", values), shape.trimmed);
  const double sampled = chosen("dgc", values);
  EXPECT_GE(sampled, 0.8);
  EXPECT_LE(sampled, 1);
  for (const char* cured :
       {"gaussiank:finish=exact", "redsync:finish=exact", "redsync:search=trimmed,finish=exact"}) {
    EXPECT_EQ(chosen(cured, values), 1) << cured;
  }
}

// The text of the paper puts all of k into one tail, so that both tails hold twice as many.
TEST(RulesQuality, OneSideSelectsTwiceAsMany) {
  const Floats values = vector_of(kShapes[0]);
  expect_count("one side", chosen("gaussiank:sides=one,evaluations=1", values), 2);
  expect_count("at 5 %", chosen("gaussiank:sides=one,evaluations=1", values, "0.05"), 2);
  expect_count("two sides at 5 %", chosen("gaussiank", values, "0.05"), 1);
}

// ---- Theorem 1 of arXiv 1911.08772 -------------------------------------------------------------

/// Squares in descending order, in units of the largest.
std::vector<double> ordered_squares(const Floats& values) {
  std::vector<double> squares;
  for (const float x : values) squares.push_back(static_cast<double>(x) * x);
  std::ranges::sort(squares, std::greater<>());
  const double largest = squares[0];
  for (double& x : squares) x /= largest;
  return squares;
}

/// Share of the energy that the top k leave behind.
double left_behind(const std::vector<double>& squares) {
  const double kept = std::accumulate(squares.begin(), squares.begin() + kWanted, 0.0);
  return 1 - kept / std::accumulate(squares.begin(), squares.end(), 0.0);
}

constexpr double kShare = static_cast<double>(kWanted) / kPlaces;
constexpr double kBound = (1 - kShare) * (1 - kShare);

// The premise: ordered squares lie below the line from the largest to zero. The proof needs no
// more: then the tail holds at most the triangle's share.
bool below_the_line(const std::vector<double>& squares) {
  for (std::size_t i = 0; i < squares.size(); ++i) {
    if (squares[i] > 1 - static_cast<double>(i) / kPlaces + 1e-9) return false;
  }
  return true;
}

/// Means over a hundred stretches, whose falls must become smaller.
bool convex(const std::vector<double>& squares) {
  std::vector<double> means;
  for (std::size_t i = 0; i < kPlaces; i += kPlaces / 100) {
    means.push_back(
        std::accumulate(squares.begin() + static_cast<std::ptrdiff_t>(i),
                        squares.begin() + static_cast<std::ptrdiff_t>(i + kPlaces / 100), 0.0));
  }
  for (std::size_t i = 2; i < means.size(); ++i) {
    if (means[i] - means[i - 1] < means[i - 1] - means[i - 2] - 1e-4 * means[0]) return false;
  }
  return true;
}

TEST_P(RulesQuality, BellShapedVectorsKeepTheBound) {
  const std::vector<double> squares = ordered_squares(vector_of(GetParam()));
  if (std::string(GetParam().name) == "equal") {
    EXPECT_FALSE(below_the_line(squares));
    EXPECT_GT(left_behind(squares), kBound);
    EXPECT_NEAR(left_behind(squares), 1 - kShare, 1e-6);
    return;
  }
  EXPECT_TRUE(below_the_line(squares));
  EXPECT_TRUE(convex(squares));
  EXPECT_LE(left_behind(squares), kBound);
}

// ---- with error feedback -----------------------------------------------------------------------

/// Counts in units of the budget of 20, over the last 1000 of 3000 steps of independent noise.
struct Counts {
  double mean = 0;
  int outside = 0, none = 0;  // beyond [2/3, 4/3]; nothing sent

  Counts(const std::string& select, double log_deviation) {
    constexpr std::size_t kEntries = 20'000;
    Reducer reducer(one_parameter(kEntries),
                    {"topk", {{"density", "0.001"}, {"granularity", "model"}, {"select", select}}});
    std::mt19937 rng(3);
    Floats scales(kEntries), gradient(kEntries);
    for (float& x : scales) x = static_cast<float>(std::exp(log_deviation * normal(rng)));
    comm::Self comm;
    const std::size_t ids[] = {0};
    for (int s = 0; s < 3000; ++s) {
      for (std::size_t i = 0; i < kEntries; ++i) {
        gradient[i] = scales[i] * (static_cast<float>(rng()) * 0x1p-31f - 1);
      }
      reducer.begin(comm);
      reducer.add(ids, gradient);
      const double count = static_cast<double>(reducer.finish().selected) / 20;
      if (s < 2000) continue;
      mean += count / 1000;
      outside += count < 2.0 / 3 || count > 4.0 / 3 ? 1 : 0;
      none += count == 0 ? 1 : 0;
    }
  }
};

// What the memory leaves of noise is not normal: the published rule sends next to nothing, and in
// most steps nothing at all if entries differ in scale.
TEST(RulesQuality, GaussianKCollapsesOnWhatErrorFeedbackLeaves) {
  const Counts even("gaussiank", 0), uneven("gaussiank", 1);
  EXPECT_LT(even.mean, 0.4);
  EXPECT_GT(even.outside, 900);
  EXPECT_LT(uneven.mean, 0.1);
  EXPECT_GT(uneven.none, 500);
}

TEST(RulesQuality, AnExactFinishCuresIt) {
  for (const double log_deviation : {0.0, 1.0}) {
    const Counts cured("gaussiank:finish=exact", log_deviation);
    EXPECT_EQ(cured.outside, 0);
    EXPECT_NEAR(cured.mean, 1, 1e-9);
  }
}

}  // namespace
}  // namespace topreduce::laws
