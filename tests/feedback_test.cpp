// Memories that estimate the gradient (ef21, ef21m) or carry momentum, beyond the laws of
// reducer_test.cpp.

#include "topreduce/feedback/feedback.h"

#include <cmath>
#include <limits>

#include "cluster.h"
#include "topreduce/reducer.h"

namespace topreduce::laws {
namespace {

constexpr int kRanks = 3;

std::vector<Floats> gradients_at(int step, const Layout& layout) {
  return gradients_of(kRanks, step, [&](int r, int s) { return heavy_tailed(r, s, layout); });
}

class Estimates : public testing::TestWithParam<const char*> {
 protected:
  std::string name() const { return parse_spec(GetParam()).name; }
  double eta() const {
    const Spec spec = parse_spec(GetParam());
    return spec.settings.contains("eta") ? std::stod(spec.settings.at("eta")) : 1;
  }
  Spec with(const char* method) const {
    Spec spec = parse_spec(method);
    spec.settings["feedback"] = GetParam();
    return spec;
  }
};

INSTANTIATE_TEST_SUITE_P(All, Estimates,
                         testing::Values("ef21", "ef21m:eta=0.1", "ef21m:eta=0.7", "ef21m:eta=1"));

// The published form has h, an estimate of its own on every rank, and their mean. With a shared
// support ours keeps the mean alone, and the mean is the same.
TEST_P(Estimates, TheReducedFormEqualsThePublishedOne) {
  const Layout layout = small_model();
  const std::size_t n = layout.size();
  Cluster cluster(kRanks, layout, with("randk:density=0.2,values=fp32"));
  Cluster mask(1, layout, "randk:density=0.2,feedback=none");  // draws the same places
  std::vector<std::vector<double>> h(kRanks), estimate(kRanks);
  std::vector<double> mean(n);
  for (int s = 0; s < 40; ++s) {
    const auto gradients = gradients_at(s, layout);
    const Floats drawn = mask.step({Floats(n, 1.0f)}, one_bucket(layout))[0].gradient;
    for (std::size_t r = 0; r < kRanks; ++r) {
      if (s == 0) h[r] = estimate[r] = {gradients[r].begin(), gradients[r].end()};
      for (std::size_t i = 0; i < n; ++i) {
        if (s == 0) mean[i] += estimate[r][i] / kRanks;
        h[r][i] = (1 - eta()) * h[r][i] + eta() * gradients[r][i];
        if (s == 0 || drawn[i] == 0) continue;
        mean[i] += (h[r][i] - estimate[r][i]) / kRanks;
        estimate[r][i] = h[r][i];
      }
    }
    const auto outcomes = cluster.step(gradients, three_buckets(layout));
    for (std::size_t i = 0; i < n; ++i) {
      ASSERT_NEAR(outcomes[0].gradient[i], mean[i], 1e-5 * (1 + std::abs(mean[i])))
          << "step " << s << ", entry " << i;
    }
  }
}

TEST_P(Estimates, KeepNoMoreBuffersThanTheyNeed) {
  const auto buffers = [&](const char* method) {
    Reducer reducer(small_model(), with(method));
    const State state = state_of(reducer);
    return std::ranges::count_if(
        state, [&](const auto& part) { return part.second.size() == small_model().size(); });
  };
  const bool momentum = name() == "ef21m";
  EXPECT_EQ(buffers("randk"), momentum ? 2 : 1);
  EXPECT_EQ(buffers("arc_topk"), momentum ? 2 : 1);
  EXPECT_EQ(buffers("topk:granularity=model"), momentum ? 3 : 2);
}

// The first step that is voted through sends everything, whatever the density.
TEST_P(Estimates, StartWithOneDenseStep) {
  const Layout layout = small_model();
  for (const char* method : {"topk:density=0.05,values=fp32", "randk:density=0.05,values=fp32"}) {
    Cluster cluster(kRanks, layout, with(method)), dense(kRanks, layout, "dense");
    auto lost = gradients_at(0, layout);
    lost[1][7] = std::numeric_limits<float>::infinity();
    EXPECT_FALSE(cluster.step(lost, three_buckets(layout))[0].stats.finite);
    const auto first = cluster.step(gradients_at(0, layout), three_buckets(layout));
    const auto mean = dense.step(gradients_at(0, layout), three_buckets(layout));
    EXPECT_EQ(first[0].stats.budget, layout.size());
    EXPECT_TRUE(same_bits(first[0].gradient, mean[0].gradient));
    EXPECT_NEAR(first[0].stats.kept_energy, 1, 1e-5);
    const auto second = cluster.step(gradients_at(1, layout), three_buckets(layout));
    EXPECT_LT(second[0].stats.budget, layout.size() / 10);
  }
}

// Distance from h to the estimate, known where a rank keeps its own.
TEST_P(Estimates, OwedNormIsTheDistanceToTheEstimate) {
  const Layout layout = small_model();
  Cluster cluster(kRanks, layout, with("topk:density=0.05,values=fp32,granularity=model"));
  std::vector<std::vector<double>> h(kRanks);
  for (int s = 0; s < 10; ++s) {
    const auto gradients = gradients_at(s, layout);
    const auto outcomes = cluster.step(gradients, one_bucket(layout));
    for (std::size_t r = 0; r < kRanks; ++r) {
      if (s == 0) h[r] = {gradients[r].begin(), gradients[r].end()};
      const Floats estimate = estimate_of(outcomes[r].state);
      double distance = 0;
      for (std::size_t i = 0; i < layout.size(); ++i) {
        h[r][i] = (1 - eta()) * h[r][i] + eta() * gradients[r][i];
        distance += (h[r][i] - estimate[i]) * (h[r][i] - estimate[i]);
      }
      // Both are differences of the energy, so known to a part of it.
      const double energy = std::inner_product(h[r].begin(), h[r].end(), h[r].begin(), 0.0);
      const double owed = outcomes[r].stats.owed_norm;
      EXPECT_NEAR(owed * owed, distance, 1e-5 * energy + 1e-4 * distance) << "step " << s;
      EXPECT_TRUE(outcomes[r].owed.empty());
    }
  }
}

// Ranks that choose alone need estimates of their own: another form, so another start.
TEST_P(Estimates, StartAnewWhenTheRanksBeginToChooseAlone) {
  const Layout layout = small_model();
  Cluster cluster(kRanks, layout, with("topk:density=0.05,values=fp32,granularity=model"));
  const auto budget = [&](int s) {
    return cluster.step(gradients_at(s, layout), one_bucket(layout))[0].stats.budget;
  };
  EXPECT_EQ(budget(0), layout.size());
  EXPECT_LT(budget(1), layout.size());
  for (Reducer& reducer : cluster.reducers()) reducer.configure({"", {{"density", "0.1"}}});
  EXPECT_LT(budget(2), layout.size());
  for (Reducer& reducer : cluster.reducers()) reducer.configure({"", {{"exchange", "randk"}}});
  EXPECT_EQ(budget(3), layout.size());
  EXPECT_LT(budget(4), layout.size());
}

// ---- momentum ----------------------------------------------------------------------------------

class Momentum : public testing::TestWithParam<const char*> {
 protected:
  Spec with(const char* method, const std::string& masking) const {
    Spec spec = parse_spec(method);
    spec.settings["feedback"] = "momentum:momentum=0.8,form=" + std::string(GetParam()) + masking;
    return spec;
  }

  /// The next step of dense SGD with momentum, as PyTorch has it; `buffer` is the optimizer's.
  double dense_step(double gradient, double& buffer) const {
    buffer = 0.8 * buffer + gradient;
    return std::string(GetParam()) == "plain" ? buffer : gradient + 0.8 * buffer;
  }
  /// The velocity of the paper that belongs to that buffer.
  double velocity(double buffer) const {
    return std::string(GetParam()) == "plain" ? buffer : 0.8 * buffer;
  }
};

INSTANTIATE_TEST_SUITE_P(Forms, Momentum, testing::Values("plain", "nesterov"));

// Momentum correction: whatever is chosen, all that was delivered and all that is unsent are the
// steps of dense SGD with momentum.
TEST_P(Momentum, OnlyDelaysTheStepsOfDenseSgd) {
  const Layout layout = small_model();
  for (const char* method : {"topk:density=0.05,values=fp32", "randk:density=0.05,values=fp32",
                             "ok_topk:density=0.05,values=fp32"}) {
    Cluster cluster(kRanks, layout, with(method, ",masking=off"));
    std::vector<double> buffer(layout.size()), dense(layout.size()), got(layout.size());
    std::vector<Outcome> outcomes;
    for (int s = 0; s < 40; ++s) {
      const auto gradients = gradients_at(s, layout);
      outcomes = cluster.step(gradients, three_buckets(layout));
      for (std::size_t i = 0; i < layout.size(); ++i) {
        const double mean = (gradients[0][i] + gradients[1][i] + gradients[2][i]) / 3.0;
        dense[i] += dense_step(mean, buffer[i]);
        got[i] += outcomes[0].gradient[i];
      }
    }
    for (const Outcome& outcome : outcomes) {
      const Floats speed = floats_of(outcome.state, "momentum.velocity");
      for (std::size_t i = 0; i < layout.size(); ++i) {
        got[i] += (outcome.owed[i] - 0.8 * speed[i]) / kRanks;
      }
    }
    for (std::size_t i = 0; i < layout.size(); ++i) {
      ASSERT_NEAR(got[i], dense[i], 1e-3 * (1 + std::abs(dense[i]))) << method << ", entry " << i;
    }
  }
}

// Momentum factor masking: what is sent starts anew, all else gains speed.
TEST_P(Momentum, MaskingStopsWhatWasSent) {
  const Layout layout = small_model();
  Cluster cluster(1, layout, with("topk:density=0.05,values=fp32,granularity=model", ""));
  std::vector<double> buffer(layout.size());
  for (int s = 0; s < 20; ++s) {
    const auto gradients =
        gradients_of(1, s, [&](int r, int step) { return heavy_tailed(r, step, layout); });
    const auto outcomes = cluster.step(gradients, one_bucket(layout));
    const Floats speed = floats_of(outcomes[0].state, "momentum.velocity");
    for (std::size_t i = 0; i < layout.size(); ++i) {
      dense_step(gradients[0][i], buffer[i]);
      if (outcomes[0].gradient[i] != 0) buffer[i] = 0;
      ASSERT_NEAR(speed[i], velocity(buffer[i]), 1e-4 * (1 + std::abs(buffer[i]))) << "step " << s;
    }
  }
}

// Dense steps mask nothing, so that compression can begin at any time.
TEST_P(Momentum, DenseStepsAreSgdWithMomentum) {
  const Layout layout = small_model();
  Cluster cluster(kRanks, layout, with("topk:density=0.05,values=fp32,warmup_steps=10", ""));
  std::vector<double> buffer(layout.size());
  for (int s = 0; s < 10; ++s) {
    const auto gradients = gradients_at(s, layout);
    const auto outcomes = cluster.step(gradients, three_buckets(layout));
    for (std::size_t i = 0; i < layout.size(); ++i) {
      const double mean = (gradients[0][i] + gradients[1][i] + gradients[2][i]) / 3.0;
      const double want = dense_step(mean, buffer[i]);
      ASSERT_NEAR(outcomes[0].gradient[i], want, 1e-4 * (1 + std::abs(want))) << "step " << s;
    }
  }
  const auto outcomes = cluster.step(gradients_at(10, layout), three_buckets(layout));
  EXPECT_LT(outcomes[0].stats.delivered, layout.size() / 2);
}

}  // namespace
}  // namespace topreduce::laws
