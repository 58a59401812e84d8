// Ranks that compare what they hold before they commit: who differs is named on all of them, and
// nothing has happened.

#include <optional>

#include "cluster.h"

namespace topreduce::laws {
namespace {

class Drift : public testing::TestWithParam<int> {
 protected:
  /// A step in which rank `odd` says that it has other parameters; errors by rank.
  std::vector<std::string> step(Cluster& cluster, std::optional<int> odd) {
    std::vector<std::string> errors(static_cast<std::size_t>(cluster.ranks()));
    run_ranks(cluster.ranks(), [&](Communicator& comm) {
      Reducer& reducer = cluster[comm.rank()];
      Floats gradient = heavy_tailed(comm.rank(), static_cast<int>(reducer.step()), layout_);
      std::vector<std::size_t> all;
      for (std::size_t id = 0; id < layout_.count(); ++id) all.push_back(id);
      try {
        reducer.begin(comm);
        reducer.verify(comm.rank() == odd ? 8 : 7);
        reducer.add(all, gradient);
        reducer.finish();
      } catch (const DriftError& error) {
        errors[static_cast<std::size_t>(comm.rank())] = error.what();
      }
    });
    return errors;
  }

  const Layout layout_ = small_model();
};

TEST_P(Drift, IsNamedOnAllRanksBeforeAnythingIsCommitted) {
  const int ranks = GetParam();
  Cluster cluster(ranks, layout_, "topk:density=0.1");
  for (int s = 0; s < 3; ++s) {
    for (const std::string& error : step(cluster, {})) EXPECT_EQ(error, "");
  }
  for (int odd = 0; odd < ranks; ++odd) {
    std::vector<State> before;
    for (Reducer& reducer : cluster.reducers()) before.push_back(state_of(reducer));
    const auto errors = step(cluster, odd);
    // Of two nobody can say who is right: the second is the one that differs.
    const int named = ranks == 2 ? 1 : odd;
    for (std::size_t r = 0; r < errors.size(); ++r) {
      const std::string wanted = "step 3: the ranks have drifted apart: rank " +
                                 std::to_string(named) + " has other parameters than rank";
      EXPECT_EQ(errors[r].substr(0, wanted.size()), wanted) << errors[r];
      EXPECT_EQ(state_of(cluster[static_cast<int>(r)]), before[r]);
    }
  }
  for (const std::string& error : step(cluster, {})) EXPECT_EQ(error, "");
}

INSTANTIATE_TEST_SUITE_P(On, Drift, testing::Values(2, 3, 5, 9));

TEST(DriftOfOneRank, IsNone) {
  const Layout layout = small_model();
  Reducer reducer(layout, "topk:density=0.1");
  EXPECT_THROW(reducer.verify(7), std::invalid_argument);
}

}  // namespace
}  // namespace topreduce::laws
