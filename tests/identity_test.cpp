// A message says whose gradients it carries: gradients of equal size in another order, and ranks
// that learnt different things, are never mixed up.

#include "cluster.h"
#include "topreduce/reducer.h"

namespace topreduce::laws {
namespace {

Layout twins() {
  return Layout({{"a.weight", {4, 8}}, {"b.weight", {4, 8}}, {"c.bias", {32}}});
}

/// One step in which every rank has its own cut; what went wrong by rank, empty if nothing did.
std::vector<std::string> step(std::span<Reducer> reducers, const std::vector<Cut>& cuts,
                              std::vector<Floats>& gradients) {
  std::vector<std::string> errors(reducers.size());
  run_ranks(static_cast<int>(reducers.size()), [&](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    Reducer& reducer = reducers[rank];
    std::span<float> gradient = gradients[rank];
    try {
      reducer.begin(comm);
      for (const auto& bucket : cuts[rank]) {
        std::size_t size = 0;
        for (const std::size_t id : bucket) size += reducer.layout()[id].size;
        reducer.add(bucket, gradient.first(size));
        gradient = gradient.subspan(size);
      }
      reducer.finish();
    } catch (const WireError& error) {
      errors[rank] = error.what();
      throw;
    } catch (const CommError& error) {
      errors[rank] = error.what();
    }
  });
  return errors;
}

class Identity : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Rows, Identity, testing::ValuesIn(rows()),
                         [](const auto& test) { return name_of(test.param); });

// Rank 1 hands over b before a: each gets its own mean.
TEST_P(Identity, AnotherOrderIsNotMixedUp) {
  const Layout layout = twins();
  Spec spec = parse_spec(GetParam());
  spec.settings["bucket_cap_mb"] = "0";
  spec.settings["values"] = "fp32";
  std::vector<Reducer> reducers;
  for (int r = 0; r < 3; ++r) reducers.emplace_back(layout, spec);
  ASSERT_EQ(
      reducers[0].buckets().size(),
      spec.settings.contains("granularity") && spec.settings["granularity"] == "model" ? 1 : 3);
  const Cut usual = {{0}, {1}, {2}}, other = {{1}, {0}, {2}};
  for (int s = 0; s < 3; ++s) {
    std::vector<Floats> gradients(3, Floats(layout.size()));
    for (std::size_t r = 0; r < 3; ++r) {
      for (std::size_t i = 0; i < layout.size(); ++i) {
        const std::size_t id = (r == 1 ? other : usual)[i / 32][0];
        gradients[r][i] = id == 0 ? 1 : 100;
      }
    }
    for (const std::string& error : step(reducers, {usual, other, usual}, gradients)) {
      EXPECT_EQ(error, "");
    }
    EXPECT_TRUE(
        same_bits(std::span(gradients[0]).first(32), std::span(gradients[1]).subspan(32, 32)));
    EXPECT_TRUE(
        same_bits(std::span(gradients[0]).subspan(32, 32), std::span(gradients[1]).first(32)));
    for (std::size_t i = 0; i < 32; ++i) EXPECT_LT(gradients[0][i], 10);
  }
}

// A state of another step on one rank: its cut, budget or regions are not those of the others.
TEST(Identity, RanksThatLearntOtherThingsFindOut) {
  const Layout layout({{"a.weight", {40, 50}}});
  for (const char* name : {"ok_topk.threshold", "ok_topk.bound.8", "ok_topk.due"}) {
    std::vector<Reducer> reducers;
    for (int r = 0; r < 2; ++r) {
      reducers.emplace_back(layout, "ok_topk:density=0.1,values=fp32,period=100,tau=100");
    }
    const auto gradients_at = [&](int at) {
      return gradients_of(2, at, [&](int r, int s) { return heavy_tailed(r, s, layout); });
    };
    const std::vector<Cut> cuts(2, one_bucket(layout));
    for (int s = 1; s < 4; ++s) {
      auto gradients = gradients_at(s);
      step(reducers, cuts, gradients);
    }
    State state = state_of(reducers[1]);
    double value = std::bit_cast<double>(state[name][0]);
    value = std::string_view(name) == "ok_topk.due" ? 1 - value
            : value > 1                             ? value - 1
                                                    : value * 1.5;
    state[name][0] = std::bit_cast<std::uint64_t>(value);
    Loader loader(state);
    reducers[1].visit(loader);
    auto gradients = gradients_at(4);
    try {
      step(reducers, cuts, gradients);
      ADD_FAILURE() << name << ": nobody noticed";
    } catch (const WireError& error) {
      EXPECT_NE(std::string(error.what()).find("load states of the same step"), std::string::npos)
          << name << ": " << error.what();
    }
  }
}

}  // namespace
}  // namespace topreduce::laws
