// A run over time: loss scale, warm-up and ramp, bypass, new settings, checkpoints, and a caller's
// mistakes.

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "cluster.h"
#include "expect_error.h"
#include "topreduce/comm/self.h"
#include "topreduce/comm/thread.h"
#include "topreduce/reducer.h"

namespace topreduce::laws {
namespace {

class Run : public testing::TestWithParam<const char*> {
 protected:
  Cluster cluster() const { return Cluster(3, layout_, GetParam()); }
  std::vector<Floats> gradients(int step) const {
    return gradients_of(3, step, [&](int r, int s) { return heavy_tailed(r, s, layout_); });
  }
  std::vector<Outcome> take_step(Cluster& cluster, int step) const {
    return cluster.step(gradients(step), cut_);
  }
  static void expect_same(const std::vector<Outcome>& got, const std::vector<Outcome>& want) {
    for (std::size_t r = 0; r < got.size(); ++r) {
      EXPECT_TRUE(same_bits(got[r].gradient, want[r].gradient));
      EXPECT_EQ(got[r].state, want[r].state);
    }
  }

  const Layout layout_ = small_model();
  const Cut cut_ = three_buckets(layout_);
};

INSTANTIATE_TEST_SUITE_P(Rows, Run, testing::ValuesIn(fewer_rows()),
                         [](const auto& test) { return name_of(test.param); });

// What is owed is kept without the scale, so it may change between steps.
TEST_P(Run, LossScaleDoesNotMatter) {
  Cluster plain = cluster(), scaled = cluster();
  for (int s = 0; s < 6; ++s) {
    const float scale = s % 2 == 0 ? 1024 : 64;
    auto large = gradients(s);
    for (Floats& gradient : large) {
      for (float& x : gradient) x *= scale;
    }
    auto outcomes = scaled.step(large, cut_, scale);
    for (Outcome& outcome : outcomes) {
      for (float& x : outcome.gradient) x /= scale;
    }
    expect_same(outcomes, take_step(plain, s));
  }
}

TEST_P(Run, BypassIsADenseMeanAndLeavesWhatIsOwed) {
  Cluster reference = cluster(), bypassed = cluster();
  Spec dense_spec = parse_spec("dense");
  dense_spec.settings["values"] = bypassed[0].spec().settings.at("values");
  Cluster dense(3, layout_, dense_spec);
  for (int s = 0; s < 6; ++s) expect_same(take_step(bypassed, s), take_step(reference, s));

  for (Reducer& reducer : bypassed.reducers()) {
    reducer.set_mode(Reducer::Mode::bypass);
    EXPECT_EQ(reducer.density(), 1);
  }
  auto before = state_of(bypassed[0]);
  const auto outcomes = take_step(bypassed, 6);
  EXPECT_TRUE(same_bits(outcomes[0].gradient, take_step(dense, 6)[0].gradient));
  EXPECT_EQ(outcomes[0].stats.delivered, layout_.size());
  before["step"] = outcomes[0].state.at("step");  // time goes on, nothing else
  EXPECT_EQ(outcomes[0].state, before);

  for (Reducer& reducer : bypassed.reducers()) reducer.set_mode(Reducer::Mode::compress);
  for (Cluster* each : {&bypassed, &reference}) {
    for (Reducer& reducer : each->reducers()) {
      State later = state_of(reducer);
      later["step"] = {std::bit_cast<std::uint64_t>(7.0)};
      Loader loader(later);
      reducer.visit(loader);
    }
  }
  expect_same(take_step(bypassed, 7), take_step(reference, 7));
}

TEST_P(Run, CheckpointsAreExact) {
  Cluster whole = cluster(), first = cluster(), second = cluster();
  for (int s = 0; s < 10; ++s) expect_same(take_step(first, s), take_step(whole, s));
  for (int r = 0; r < 3; ++r) {
    const State state = state_of(first[r]);
    Loader loader(state);
    second[r].visit(loader);
    EXPECT_EQ(state_of(second[r]), state);
    EXPECT_EQ(second[r].step(), 10);
  }
  for (int s = 10; s < 20; ++s) expect_same(take_step(second, s), take_step(whole, s));
}

TEST_P(Run, WarmUpIsDense) {
  Spec spec = parse_spec(GetParam());
  spec.settings["warmup_steps"] = "3";
  spec.settings["values"] = "fp32";
  if (feedback_name(Reducer(layout_, spec)) == "momentum") {  // dense it is SGD with momentum
    spec.settings["feedback"] = "momentum:momentum=0";
  }
  Cluster warming(3, layout_, spec), dense(3, layout_, "dense");
  for (int s = 0; s < 3; ++s) {
    EXPECT_EQ(warming[0].density(), 1);
    const auto outcomes = take_step(warming, s);
    EXPECT_TRUE(same_bits(outcomes[0].gradient, take_step(dense, s)[0].gradient));
    EXPECT_TRUE(same_bits(outcomes[0].owed, Floats(outcomes[0].owed.size())));
    EXPECT_EQ(outcomes[0].stats.budget, layout_.size());
  }
}

TEST(ReducerRun, RampFallsGeometrically) {
  const Layout layout = one_parameter(1000);
  Cluster cluster(2, layout,
                  "topk:density=0.01,values=fp32,granularity=model,warmup_steps=1,ramp_steps=3");
  const double densities[] = {1, std::pow(0.01, 0.25), 0.1, std::pow(0.01, 0.75), 0.01, 0.01};
  for (int s = 0; s < 6; ++s) {
    EXPECT_DOUBLE_EQ(cluster[0].density(), densities[s]);
    const auto outcomes = cluster.step(
        gradients_of(2, s, [&](int r, int step) { return heavy_tailed(r, step, layout); }),
        one_bucket(layout));
    const auto k = static_cast<std::uint64_t>(std::lround(1000 * densities[s]));
    EXPECT_EQ(outcomes[0].stats.budget, k);
    EXPECT_EQ(outcomes[0].stats.selected, k);
  }
}

// A rank for which others make the steps knows as well as they do what comes next.
TEST(ReducerRun, SkipsToTheStepOfOthers) {
  const Layout layout = one_parameter(100);
  const std::string method = "topk:density=0.1,granularity=model,warmup_steps=2,ramp_steps=3";
  Cluster cluster(2, layout, method);
  Reducer idle(layout, method);
  for (int s = 0; s < 6; ++s) {
    EXPECT_EQ(idle.step(), cluster[0].step());
    EXPECT_EQ(idle.density(), cluster[0].density());
    cluster.step({Floats(100, 1.0f), Floats(100, 2.0f)}, one_bucket(layout));
    idle.skip_to(cluster[0].step());
  }
  EXPECT_EQ(std::ranges::count(idle.owed(), 0.0f), 100);
}

// Early in a ramp, with many ranks, everything costs less than what each rank would gather.
TEST(ReducerRun, RampStaysDenseWhileThatIsCheaper) {
  const Layout layout = one_parameter(1000);
  Cluster cluster(8, layout, "topk:density=0.01,values=fp32,granularity=model,ramp_steps=3");
  const std::uint64_t budgets[] = {1000, 100, 32, 10};  // 316 entries from each would be more
  for (int s = 0; s < 4; ++s) {
    const auto outcomes = cluster.step(
        gradients_of(8, s, [&](int r, int step) { return heavy_tailed(r, step, layout); }),
        one_bucket(layout));
    EXPECT_EQ(outcomes[0].stats.budget, budgets[s]);
  }
}

TEST(ReducerRun, AverageIsAWholeStep) {
  const Layout layout = small_model();
  Cluster cluster(3, layout, "topk");
  std::vector<Floats> gradients =
      gradients_of(3, 0, [&](int r, int s) { return heavy_tailed(r, s, layout); });
  const auto want = cluster.step(gradients, one_bucket(layout));
  run_ranks(3, [&](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    Reducer reducer(layout, "topk");
    EXPECT_EQ(reducer.average(comm, gradients[rank]).selected, want[rank].stats.selected);
    EXPECT_TRUE(same_bits(gradients[rank], want[rank].gradient));
    EXPECT_EQ(state_of(reducer), want[rank].state);
  });
}

TEST(ReducerRun, ConfigureKeepsWhatIsOwed) {
  const Layout layout = one_parameter(1000);
  Cluster cluster(2, layout, "topk:density=0.05,values=fp32,granularity=model");
  const auto gradient = [&](int r, int step) { return heavy_tailed(r, step, layout); };
  for (int s = 0; s < 4; ++s) cluster.step(gradients_of(2, s, gradient), one_bucket(layout));
  const State before = state_of(cluster[0]);
  for (Reducer& reducer : cluster.reducers()) {
    reducer.configure({"", {{"density", "0.002"}, {"values", "bf16"}}});
    EXPECT_EQ(reducer.spec().settings.at("density"), "0.002");
    EXPECT_EQ(reducer.density(), 0.002);
  }
  EXPECT_EQ(state_of(cluster[0]), before);
  const auto outcomes = cluster.step(gradients_of(2, 4, gradient), one_bucket(layout));
  EXPECT_EQ(outcomes[0].stats.budget, 2);
  EXPECT_EQ(outcomes[0].stats.selected, 2);
}

TEST(ReducerRun, ConfigureRefusesMistakesAndChangesNothing) {
  Reducer reducer(small_model(), "topk:density=0.05,values=fp32");
  const State before = state_of(reducer);
  const std::string spec = to_string(reducer.spec());
  expect_error([&] { reducer.configure({"", {{"density", "7"}}}); }, {"density=7", "(0, 1]"});
  expect_error([&] { reducer.configure({"", {{"feedback", "none"}}}); }, {"configure", "feedback"});
  expect_error([&] { reducer.configure({"", {{"keep_dense", "*bias"}}}); }, {"keep_dense"});
  expect_error(
      [&] {
        reducer.configure({"", {{"densty", "1"}}});
      },
      {"densty", "did you mean 'density'"});
  EXPECT_EQ(state_of(reducer), before);
  EXPECT_EQ(to_string(reducer.spec()), spec);
}

// Ranks must meet again on what was changed on one of them.
TEST(ReducerRun, ChangesAreComparedBeforeTheNextStep) {
  const Layout layout = one_parameter(100);
  Cluster cluster(2, layout, "topk:density=0.05,values=fp32");
  cluster[1].configure({"", {{"density", "0.06"}}});
  expect_error(
      [&] {
        cluster.step({Floats(100), Floats(100)}, one_bucket(layout));
      },
      {"rank 0: density = 0.05", "rank 1: density = 0.06"});
  cluster[0].configure({"", {{"density", "0.06"}}});
  EXPECT_FALSE(cluster.step({Floats(100), Floats(100)}, one_bucket(layout))[0].failed());
}

TEST(ReducerRun, MistakesAreNamed) {
  const Layout layout({{"first", {2}}, {"second", {3}}});
  Reducer reducer(layout, "topk:density=0.5,values=fp32");
  comm::Self comm;
  Floats gradient(5, 1.0f);
  const std::size_t both[] = {0, 1}, second[] = {1}, twice[] = {1, 1}, unknown[] = {2};
  const std::span<float> five(gradient), three(five.first(3));

  expect_error([&] { reducer.finish(); }, {"finish", "begin"});
  expect_error([&] { reducer.add(both, five); }, {"add", "begin"});
  expect_error([&] { reducer.begin(comm, -1); }, {"loss_scale", "-1"});
  expect_error([&] { reducer.begin(comm, std::nanf("")); }, {"loss_scale", "nan"});

  const auto expect_add_error = [&](std::span<const std::size_t> ids, std::span<float> part,
                                    std::vector<std::string> words) {
    reducer.begin(comm);
    expect_error([&] { reducer.add(ids, part); }, words);
  };
  expect_add_error(both, three, {"add", "3", "5"});
  expect_add_error(twice, five, {"add", "'second'", "twice"});
  expect_add_error(unknown, five, {"add", "2"});
  reducer.begin(comm);
  expect_error([&] { reducer.begin(comm); }, {"begin", "open"});
  expect_error([&] { reducer.configure({"", {}}); }, {"configure", "open"});
  expect_error([&] { reducer.set_mode(Reducer::Mode::bypass); }, {"set_mode", "open"});
  expect_error([&] { reducer.skip_to(7); }, {"skip_to", "open"});
  expect_error([&] { state_of(reducer); }, {"state", "open"});
  reducer.add(second, three);
  expect_error([&] { reducer.finish(); }, {"finish", "missing 1 of 2", "first"});
  EXPECT_EQ(gradient, Floats(5, 1.0f));

  reducer.begin(comm);
  reducer.add(both, five);
  EXPECT_EQ(reducer.finish().step, 0);
}

}  // namespace
}  // namespace topreduce::laws
