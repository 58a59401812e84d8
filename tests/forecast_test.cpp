// What a step would cost, by formula, beside what it costs.

#include "topreduce/tuning/forecast.h"

#include <random>

#include "cluster.h"
#include "topreduce/comm/thread.h"

namespace topreduce::tuning {
namespace {

constexpr std::size_t kRows = 600, kColumns = 500;

Layout matrix() {
  return Layout({{"weight", {kRows, kColumns}}});
}

// Entries of magnitudes as gradients have them, so that codes are as long as they usually are.
double bytes_of_a_step(const std::string& spec, int ranks) {
  double sent = 0;
  run_ranks(ranks, [&](Communicator& comm) {
    Reducer reducer(matrix(), spec);
    constexpr int kSteps = 3;
    for (int s = 0; s < kSteps; ++s) {
      std::mt19937 random(static_cast<unsigned>(100 * s + comm.rank()));
      std::normal_distribution<float> normal;
      std::vector<float> gradient(kRows * kColumns);
      for (float& x : gradient) x = normal(random) * std::abs(normal(random));
      reducer.average(comm, gradient);
    }
    if (comm.rank() == 0) sent = static_cast<double>(reducer.stats().bytes_sent);
  });
  return sent;
}

TEST(ForecastBytes, AreThoseOfAStep) {
  // What is chosen there is exactly the budget.
  for (const std::string method :
       {"topk:density=0.01", "topk:density=0.03", "topk:density=0.03,values=bf16",
        "ok_topk:density=0.01", "ok_topk:density=0.03", "dense:seed=0", "randk:density=0.05",
        "arc_topk:density=0.2"}) {
    const std::string spec = method + ",granularity=model";
    for (const int ranks : {2, 4}) {
      SCOPED_TRACE(spec + " on " + std::to_string(ranks));
      const Pipeline pipeline(matrix(), parse_spec(spec));
      const Site site{.entries = kRows * kColumns, .ranks = ranks};
      const Forecast step = forecast(pipeline, {pipeline.density, pipeline.values}, site);
      // The threshold of ok_topk is reused, so that its counts vary.
      const double tolerance = method.starts_with("ok_topk") ? 0.25 : 0.15;
      EXPECT_NEAR(step.bytes / bytes_of_a_step(spec, ranks), 1, tolerance);
    }
  }
}

TEST(Forecast, FollowsTheNetwork) {
  const Pipeline pipeline(matrix(), parse_spec("auto"));
  double last = 0;
  for (const double rate : {1e5, 1e6, 1e7, 1e8, 1e9, 1e11}) {
    const Site site{.entries = 10e6, .ranks = 4, .computed = 0.3, .bytes_per_second = rate};
    const Level level = advise(pipeline, site);
    const double bytes = forecast(pipeline, level, site).bytes;
    EXPECT_GE(bytes, last) << rate;
    last = bytes;
    const Forecast step = forecast(pipeline, level, site);
    EXPECT_DOUBLE_EQ(step.seconds, site.computed + step.waited);
    if (rate > 1e6) {
      EXPECT_LE(step.waited, 0.05 * step.seconds);
    }
  }
  EXPECT_EQ(last, forecast(pipeline, {1, wire::ValueFormat::fp32},
                           {.entries = 10e6, .ranks = 4, .computed = 0.3})
                      .bytes)
      << "where everything hides it is sent as it is";
}

TEST(Forecast, DelayIsWaitedForOnce) {
  const Pipeline pipeline(matrix(), parse_spec("topk:density=0.01"));
  Site site{.entries = 1e6, .ranks = 4, .computed = 0.3, .bytes_per_second = 1e9};
  const double near = forecast(pipeline, {0.01, {}}, site).waited;
  site.delay = 0.015;
  EXPECT_NEAR(forecast(pipeline, {0.01, {}}, site).waited - near, 2 * 0.015, 1e-6);
}

// 40 MB in 2 / 3 of 0.3 s would need 300 MB/s; what comes last cannot hide.
TEST(Forecast, PlainDdpSendsLargeBuckets) {
  const Site slow{.entries = 10e6, .ranks = 4, .computed = 0.3, .bytes_per_second = 12.5e6};
  EXPECT_NEAR(forecast_ddp(32, slow).seconds, 60e6 / 12.5e6, 0.6);
  EXPECT_NEAR(forecast_ddp(16, slow).seconds, 30e6 / 12.5e6, 0.4);
  const Site alone{.entries = 10e6, .ranks = 1, .computed = 0.3};
  EXPECT_EQ(forecast_ddp(32, alone).seconds, 0.3);
}

}  // namespace
}  // namespace topreduce::tuning
