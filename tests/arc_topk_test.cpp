// ARC-Top-K beyond the laws of reducer_test.cpp: how much of a matrix its rows keep, what it sends,
// and that several ranks do what one would do with the mean.

#include <cmath>
#include <functional>
#include <optional>

#include "cluster.h"
#include "topreduce/agreement.h"
#include "topreduce/comm/decorator.h"
#include "topreduce/comm/self.h"
#include "topreduce/fingerprint.h"
#include "topreduce/random.h"
#include "topreduce/version.h"
#include "topreduce/wire/payload.h"
#include "topreduce/wire/seal.h"

namespace topreduce::laws {
namespace {

Layout matrix_model(std::size_t rows, std::size_t columns) {
  return Layout({{"weight", {rows, columns}}});
}

// ---- kept energy -------------------------------------------------------------------------------

using Matrix = std::function<Floats(std::mt19937&)>;

constexpr std::size_t kRows64 = 64, kColumns48 = 48;

Floats gaussian(std::mt19937& rng) {
  std::normal_distribution<float> normal;
  Floats matrix(kRows64 * kColumns48);
  for (float& x : matrix) x = normal(rng);
  return matrix;
}

Floats log_normal(std::mt19937& rng) {
  std::normal_distribution<float> normal;
  Floats matrix = gaussian(rng);
  for (std::size_t j = 0; j < kRows64; ++j) {
    const float scale = std::exp(normal(rng));
    for (std::size_t c = 0; c < kColumns48; ++c) matrix[j * kColumns48 + c] *= scale;
  }
  return matrix;
}

// 40 parallel rows share one draw of the sketch and lose together to 24 smaller orthogonal ones.
Floats adversarial(std::mt19937&) {
  Floats matrix(kRows64 * kColumns48);
  for (std::size_t j = 0; j < 40; ++j) matrix[j * kColumns48] = 1;
  for (std::size_t j = 40; j < kRows64; ++j) matrix[j * kColumns48 + j - 39] = 0.5f;
  return matrix;
}

struct Kept {
  double by_sketch = 0;  ///< share of the energy
  double best = 0;       ///< of the K largest rows
};

/// Mean over `steps` matrices, every one with directions of its own.
Kept kept_energy(const Matrix& make, std::size_t k, const std::string& settings, int steps) {
  const Layout layout = matrix_model(kRows64, kColumns48);
  const double density = static_cast<double>(k) / kRows64;
  Reducer reducer(layout, "arc_topk:feedback=none,density=" + std::to_string(density) + settings);
  comm::Self comm;
  auto rng = rng_of(0, 0);
  const std::size_t ids[] = {0};
  Kept kept;
  for (int s = 0; s < steps; ++s) {
    Floats matrix = make(rng);
    const double all = energy_of(matrix);
    Floats by_row;
    for (std::size_t j = 0; j < kRows64; ++j) {
      by_row.push_back(
          static_cast<float>(energy_of(std::span(matrix).subspan(j * kColumns48, kColumns48))));
    }
    std::ranges::sort(by_row, std::greater<>());
    reducer.begin(comm);
    reducer.add(ids, matrix);
    EXPECT_EQ(reducer.finish().selected, k * kColumns48);
    kept.by_sketch += energy_of(matrix) / all / steps;
    for (const float energy : std::span(by_row).first(k)) kept.best += energy / all / steps;
  }
  return kept;
}

std::string sketch_of(std::size_t r) {
  return ",sketch=" + std::to_string(r);
}

// Our derivation, not the paper's: E[kept] >= c(m, r) * (energy of the K largest rows).
double contraction(double m, double r) {
  return (1 - 1 / (2 * r)) / (1 + 2 * std::sqrt(std::log(m) / r) + 2 * std::log(m) / r);
}

TEST(ArcTopKQuality, KeepsWhatOurBoundPromises) {
  for (const Matrix& matrix : {Matrix(gaussian), Matrix(log_normal), Matrix(adversarial)}) {
    for (const std::size_t r : {1u, 2u, 4u, 16u}) {
      for (const std::size_t k : {1u, 13u}) {
        for (const char* stream : {",stream=gaussian", ",stream=signs"}) {
          const Kept kept = kept_energy(matrix, k, sketch_of(r) + stream, 300);
          EXPECT_GE(kept.by_sketch, contraction(kRows64, static_cast<double>(r)) * kept.best);
          EXPECT_LE(kept.by_sketch, kept.best + 1e-9);
        }
      }
    }
  }
}

// Simulated apart from this library; a random choice would keep 0.203.
TEST(ArcTopKQuality, KeepsAsMuchAsInTheSimulation) {
  const std::size_t sketches[] = {1, 2, 4, 16};
  const double no_structure[] = {0.211, 0.214, 0.219, 0.231};
  const double scaled_rows[] = {0.661, 0.741, 0.795, 0.829};
  for (std::size_t i = 0; i < 4; ++i) {
    const Kept flat = kept_energy(gaussian, 13, sketch_of(sketches[i]), 1000);
    EXPECT_NEAR(flat.by_sketch, no_structure[i], 0.004) << "sketch " << sketches[i];
    EXPECT_NEAR(flat.best, 0.258, 0.01);
    const Kept scaled = kept_energy(log_normal, 13, sketch_of(sketches[i]), 1000);
    EXPECT_NEAR(scaled.by_sketch, scaled_rows[i], 0.03) << "sketch " << sketches[i];
    EXPECT_NEAR(scaled.best, 0.836, 0.03);
  }
}

// Why four numbers are the default: below, parallel rows can lose to a random choice.
TEST(ArcTopKQuality, LosesToARandomChoiceOnlyWithASmallSketch) {
  const double random = 1.0 / kRows64;
  const std::size_t sketches[] = {1, 2, 4, 16};
  const double of_random[] = {0.61, 0.77, 0.98, 1.35};
  for (std::size_t i = 0; i < 4; ++i) {
    const Kept kept = kept_energy(adversarial, 1, sketch_of(sketches[i]), 3000);
    EXPECT_NEAR(kept.by_sketch / random, of_random[i], 0.06) << "sketch " << sketches[i];
  }
}

// ---- several ranks are one rank with the mean --------------------------------------------------

// Two ranks whose large entries cancel. Local top-k sends those and is 81 times as far off as the
// mean is large; the sketch does not even see them.
TEST(ArcTopK, DoesNotFallForWhatCancels) {
  const Layout layout = matrix_model(2, 16);
  std::vector<Floats> gradients(2, Floats(32));
  gradients[0][0] = gradients[1][16] = 1;
  gradients[0][16] = gradients[1][0] = -0.9f;
  const auto error_of = [&](const char* spec) {
    Cluster cluster(2, layout, spec);
    Floats mean = cluster.step(gradients, one_bucket(layout))[0].gradient;
    mean[0] -= 0.05f;
    mean[16] -= 0.05f;
    return energy_of(mean) / (2 * 0.05 * 0.05);
  };
  EXPECT_NEAR(error_of("topk:density=0.03125,granularity=model,feedback=none"), 81, 0.1);
  EXPECT_NEAR(error_of("arc_topk:density=0.5,feedback=none"), 0.5, 1e-4);
}

/// Multiples of `factor`, small enough for every sum to be exact.
Floats multiples(int rank, int step, std::size_t n, float factor) {
  Floats gradient = integers(rank, step, n);
  for (float& x : gradient) x *= factor;
  return gradient;
}

struct Trajectory {
  const char* feedback;
  int exact_steps;  // while whole numbers, or halves of halves, fit
};

class OnTheMean : public testing::TestWithParam<Trajectory> {
 protected:
  void expect_same_trajectory(const std::string& settings, bool exact) {
    const Layout layout = small_model();
    const std::string spec =
        "arc_topk:values=fp32,feedback=" + std::string(GetParam().feedback) + settings;
    Cluster three(3, layout, spec), one(1, layout, spec);
    const int steps = exact ? GetParam().exact_steps : 30;
    double worst = 0;
    for (int s = 0; s < steps; ++s) {
      const auto gradients = gradients_of(3, s, [&](int r, int step) {
        return exact ? multiples(r, step, layout.size(), 3) : heavy_tailed(r, step, layout);
      });
      std::vector<Floats> mean(1, Floats(layout.size()));
      for (std::size_t i = 0; i < layout.size(); ++i) {
        mean[0][i] = (gradients[0][i] + gradients[1][i] + gradients[2][i]) / 3;
      }
      const Floats got = three.step(gradients, three_buckets(layout))[0].gradient;
      const Floats want = one.step(mean, one_bucket(layout))[0].gradient;
      if (exact) {
        ASSERT_TRUE(same_bits(got, want)) << "step " << s;
        continue;
      }
      Floats difference = got;
      for (std::size_t i = 0; i < got.size(); ++i) difference[i] -= want[i];
      worst = std::max(worst, std::sqrt(energy_of(difference) / energy_of(want)));
    }
    EXPECT_LT(worst, 1e-5);
  }
};

INSTANTIATE_TEST_SUITE_P(Feedbacks, OnTheMean,
                         testing::Values(Trajectory{"residual", 20}, Trajectory{"ef21", 20},
                                         Trajectory{"(ef21m:eta=0.5)", 14}));

TEST_P(OnTheMean, ToTheBitWithWholeNumbers) {
  expect_same_trajectory(",density=0.2,stream=signs", true);
  expect_same_trajectory(",density=0.2,stream=signs,ranked=model,granularity=model", true);
  expect_same_trajectory(",density=0.1,stream=signs,width=8,random=0.3", true);
}

TEST_P(OnTheMean, ToRounding) {
  expect_same_trajectory(",density=0.2", false);
}

// ---- what is chosen, and what travels ----------------------------------------------------------

Bytes payload_of(const Floats& values) {
  Bytes bytes;
  Floats rounded(values);
  const std::size_t lengths[] = {values.size()};
  wire::encode_values(wire::ValueFormat::fp32, lengths, values, bytes, rounded);
  return bytes;
}

TEST(ArcTopK, SendsSketchesAndRowsAndNothingElse) {
  const Layout layout({{"conv", {9, 4, 3, 3}}, {"bias", {9}}, {"weight", {30, 17}}, {"scale", {}}});
  constexpr std::size_t kSketch = 3;
  Cluster cluster(3, layout, "arc_topk:density=0.2,values=fp32,sketch=3,bucket_cap_mb=1");
  for (int s = 0; s < 3; ++s) {
    const auto gradients =
        gradients_of(3, s, [&](int r, int step) { return heavy_tailed(r, step, layout); });
    const auto outcomes = cluster.step(gradients, one_bucket(layout));
    const std::size_t rows = 2 * 36 + 6 * 17;  // ceil(0.2 * 9) and ceil(0.2 * 30) of them
    const std::size_t values = (9 + 30) * kSketch + rows + 9 + 1;
    std::uint64_t sent = 0;
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(outcome.stats.selected, rows + 9 + 1);
      EXPECT_EQ(outcome.stats.rounds, 4 + 1);  // and the vote
      EXPECT_EQ(outcome.stats.messages, 2 * (4 + 1));
      sent += outcome.stats.bytes_sent;
    }
    // 2 (P - 1) / P of the values by each of P ranks; to each peer in every round a seal, exchange,
    // round and length, which may take two bytes; and the head of a frame and a vote.
    const std::size_t head = wire::kSealBytes + 3 + payload_of({}).size(), vote = 20 + 6 + 7;
    const std::size_t least =
        4 * 2 * 2 * values + 6 * (4 * head + vote + comm::Mailbox::kFrameHead);
    EXPECT_GE(sent, least);
    EXPECT_LE(sent, least + 6 * 4);
  }
}

/// Which rows of a matrix a step with one rank delivers.
std::vector<std::size_t> rows_of(Reducer& reducer, Floats gradient, std::size_t width) {
  comm::Self comm;
  std::vector<std::size_t> ids(reducer.layout().count()), rows;
  std::iota(ids.begin(), ids.end(), std::size_t{0});
  reducer.begin(comm);
  reducer.add(ids, gradient);
  reducer.finish();
  for (std::size_t i = 0; i < gradient.size(); i += width) {
    if (gradient[i] != 0) rows.push_back(i / width);
  }
  return rows;
}

TEST(ArcTopK, TiesGoToTheLowerRow) {
  Reducer reducer(matrix_model(20, 10), "arc_topk:density=0.15,feedback=none");
  const std::vector<std::size_t> lowest = {0, 1, 2};
  for (int s = 0; s < 5; ++s) EXPECT_EQ(rows_of(reducer, Floats(200, 1.0f), 10), lowest);
}

TEST(ArcTopK, BlocksHaveTheWidthAskedFor) {
  // 70 entries in blocks of 16: four, and one of 6, which is here the strongest by entry.
  Reducer reducer(matrix_model(7, 10), "arc_topk:density=0.05,width=16,feedback=none");
  Floats gradient(70, 1e-3f);
  std::fill(gradient.begin() + 64, gradient.end(), 5.0f);
  comm::Self comm;
  const std::size_t ids[] = {0};
  reducer.begin(comm);
  reducer.add(ids, gradient);
  EXPECT_EQ(reducer.finish().selected, 6);
  EXPECT_EQ(std::ranges::count(gradient, 5.0f), 6);
  EXPECT_EQ(std::ranges::count(gradient, 0.0f), 64);
}

TEST(ArcTopK, RankedOverTheModelComparesEnergyPerEntry) {
  const Layout layout({{"narrow", {10, 8}}, {"wide", {10, 80}}});
  const auto make = [&](const char* ranked) {
    Spec spec = parse_spec("arc_topk:density=0.1,granularity=model,feedback=none");
    spec.settings["ranked"] = ranked;
    return Reducer(layout, spec);
  };
  Floats gradient(880, 0.01f);
  std::fill(gradient.begin(), gradient.begin() + 80, 1.0f);  // every narrow row is stronger
  Reducer model = make("model"), tensor = make("tensor");
  EXPECT_EQ(rows_of(model, gradient, 8).size(), 10 + 10);  // and one wide row to fill the budget
  EXPECT_EQ(rows_of(tensor, gradient, 8).size(), 1 + 10);
}

TEST(ArcTopK, RandomRowsLetNoneStarve) {
  constexpr int kSteps = 2000;
  Floats gradient(40 * 8, 1e-6f);
  std::fill(gradient.begin(), gradient.begin() + 64, 1.0f);  // 8 strong rows
  for (const auto& [random, often] : {std::pair{"0", 0.0}, std::pair{"0.25", 1.0 / 37}}) {
    Reducer reducer(
        matrix_model(40, 8),
        Spec{"arc_topk", {{"density", "0.1"}, {"random", random}, {"feedback", "none"}}});
    std::vector<int> counts(40);
    for (int s = 0; s < kSteps; ++s) {
      const auto rows = rows_of(reducer, gradient, 8);
      EXPECT_EQ(rows.size(), 4);
      for (const std::size_t row : rows) ++counts[row];
    }
    // Of four rows 3 by sketch, so 8 + 32 - 3 to draw the fourth from.
    for (std::size_t row = 8; row < 40; ++row) {
      EXPECT_NEAR(counts[row], kSteps * often, often == 0 ? 0 : 30) << "row " << row;
    }
  }
}

// ---- disagreement ------------------------------------------------------------------------------

/// Gives rank 1 other sketches than the rest: what rank 0 tells it of the summed sketches is
/// changed, and sealed as if it were so.
class Forging final : public comm::Decorator {
 public:
  Forging(Communicator& inner, const wire::Identity& identity)
      : Decorator(inner), identity_(identity) {}

  void post(int peer, const comm::Tag& tag, std::span<const std::byte> head,
            std::span<const std::byte> bytes) override {
    constexpr std::uint32_t kSumsOfSketches = 1;
    if (rank() != 0 || peer != 1 || tag.exchange != 0 || tag.round != kSumsOfSketches) {
      return Decorator::post(peer, tag, head, bytes);
    }
    EXPECT_TRUE(std::ranges::equal(head, wire::seal(identity_, tag.round, bytes)));
    const Bytes forged = values_like(bytes);
    Decorator::post(peer, tag, wire::seal(identity_, tag.round, forged), forged);
  }

 private:
  /// A payload of as many values as `bytes` holds.
  static Bytes values_like(std::span<const std::byte> bytes) {
    const std::size_t count = (bytes.size() - payload_of({}).size()) / sizeof(float);
    return payload_of(Floats(count, 1e6f));
  }

  wire::Identity identity_;
};

/// What the messages of the first all-reduce are about, of a model that is one parameter.
wire::Identity identity_of(const Reducer& reducer) {
  Spec shown = reducer.spec();
  shown.settings.erase("threads");
  const std::string description =
      "topreduce " + std::string(version()) + "\n" + describe(reducer.layout(), shown);
  const std::uint64_t parameters = Fingerprint().add(std::uint64_t{0}).long_value();
  return {.origin = Fingerprint()
                        .add(Fingerprint().add(description).value())
                        .add(reducer.step())
                        .add(static_cast<std::uint64_t>(wire::ValueFormat::fp32))
                        .long_value(),
          .contents = Fingerprint().add(parameters).add(reducer.layout().size()).long_value()};
}

TEST(ArcTopK, RanksThatChoseOtherRowsFindOut) {
  const Layout layout = matrix_model(64, 48);
  Cluster cluster(3, layout, "arc_topk:density=0.2,values=fp32");
  const auto gradients =
      gradients_of(3, 0, [&](int r, int step) { return heavy_tailed(r, step, layout); });
  for (int s = 0; s < 2; ++s) cluster.step(gradients, one_bucket(layout));
  const State before = state_of(cluster[1]);
  const wire::Identity identity = identity_of(cluster[0]);
  const auto outcomes = cluster.step(gradients, one_bucket(layout), 1, [&](Communicator& comm) {
    return std::make_unique<Forging>(comm, identity);
  });
  // Who finds out first leaves, so that the others may hear no more than that.
  bool named = false;
  for (const Outcome& outcome : outcomes) {
    EXPECT_TRUE(outcome.failed());
    named = named || outcome.error.find("or chose different rows") != std::string::npos;
  }
  EXPECT_TRUE(named) << outcomes[1].error;
  EXPECT_EQ(state_of(cluster[1]), before);
}

// ---- the stream --------------------------------------------------------------------------------

TEST(RandomStream, NormalNumbersAreNormal) {
  const RandomStream stream(3, 5, RandomStream::Purpose::sketch);
  constexpr std::uint32_t kDraws = 200'000;
  double mean = 0, variance = 0, fourth = 0;
  int beyond_two = 0;
  for (std::uint32_t i = 0; i < kDraws; ++i) {
    const double x = stream.normal(i);
    mean += x / kDraws;
    variance += x * x / kDraws;
    fourth += x * x * x * x / kDraws;
    beyond_two += std::abs(x) > 2 ? 1 : 0;
  }
  EXPECT_NEAR(mean, 0, 0.01);
  EXPECT_NEAR(variance, 1, 0.015);
  EXPECT_NEAR(fourth, 3, 0.1);
  EXPECT_NEAR(beyond_two, 0.0455 * kDraws, 400);
}

}  // namespace
}  // namespace topreduce::laws
