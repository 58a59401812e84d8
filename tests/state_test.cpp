// States come from files, and files may hold anything. Every number has a range; a state with one
// outside of it changes nothing, and one that is taken keeps the laws.

#include <cmath>
#include <limits>

#include "cluster.h"
#include "topreduce/reducer.h"

namespace topreduce::laws {
namespace {

constexpr double kForgeries[] = {-1,
                                 -1e-300,
                                 0,
                                 1e-310,
                                 0.5,
                                 1e18,
                                 1e300,
                                 std::numeric_limits<double>::infinity(),
                                 -std::numeric_limits<double>::infinity(),
                                 std::numeric_limits<double>::quiet_NaN()};

/// As in a checkpoint, entries hold 32 bits each; all else are doubles.
bool is_number(const State& state, const std::string& name, std::size_t entries) {
  return state.at(name).size() != entries && name != "owed";
}

class ForgedState : public testing::TestWithParam<const char*> {
 protected:
  ForgedState() : cluster_(2, layout_, GetParam()) {}

  std::vector<Floats> gradients(int at) const {
    return gradients_of(2, at, [&](int r, int s) { return heavy_tailed(r, s, layout_); });
  }

  /// Loads `state` into both ranks as a file would be; false, and no change, if it is refused.
  bool load(const State& state) {
    for (const auto purpose : {StateVisitor::Purpose::check, StateVisitor::Purpose::load}) {
      for (Reducer& reducer : cluster_.reducers()) {
        const State before = state_of(reducer);
        try {
          Loader loader(state, purpose);
          reducer.visit(loader);
        } catch (const std::invalid_argument& error) {
          EXPECT_EQ(purpose, StateVisitor::Purpose::check) << "half of it was loaded";
          EXPECT_EQ(state_of(reducer), before);
          EXPECT_NE(std::string(error.what()).find("expected"), std::string::npos) << error.what();
          return false;
        }
      }
    }
    return true;
  }

  /// A step, and the law over the ranks and the same bits on all of them.
  void expect_lawful_step(int at, const std::string& what) {
    const auto given = gradients(at);
    std::vector<double> owed(layout_.size());
    const auto places = places_in_memory(cluster_[0]);
    for (int r = 0; r < 2; ++r) {
      for (std::size_t i = 0; i < owed.size(); ++i) {
        const bool has = places[i] < cluster_[r].owed().size();
        owed[i] += (has ? cluster_[r].owed()[places[i]] : 0) +
                   given[static_cast<std::size_t>(r)][i] * newest_scale(cluster_[r]);
      }
    }
    const auto outcomes = cluster_.step(given, cut_);
    ASSERT_EQ(outcomes[0].error, "") << what;
    ASSERT_TRUE(outcomes[0].stats.finite) << what;
    ASSERT_TRUE(same_bits(outcomes[0].gradient, outcomes[1].gradient)) << what;
    if (feedback_name(cluster_[0]) != "residual") return;
    for (std::size_t i = 0; i < owed.size(); ++i) {
      if (places[i] == kNotRemembered) continue;
      double after = 2.0 * outcomes[0].gradient[i];
      for (const Outcome& outcome : outcomes) after += outcome.owed[places[i]];
      ASSERT_NEAR(after, owed[i], 1e-3 * (1 + std::abs(owed[i]))) << what << ", entry " << i;
    }
  }

  const Layout layout_ = small_model();
  const Cut cut_ = three_buckets(layout_);
  Cluster cluster_;
};

INSTANTIATE_TEST_SUITE_P(Rows, ForgedState, testing::ValuesIn(fewer_rows()),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(ForgedState, IsRefusedOrLawful) {
  int at = 0;
  for (; at < 3; ++at) cluster_.step(gradients(at), cut_);
  const State good = state_of(cluster_[0]);
  ASSERT_TRUE(load(good));
  int refused = 0;
  for (const auto& [name, bits] : good) {
    if (!is_number(good, name, cluster_[0].remembered().size())) continue;
    for (const double forgery : kForgeries) {
      State forged = good;
      std::ranges::fill(forged[name], std::bit_cast<std::uint64_t>(forgery));
      std::ostringstream what;
      what << name << " = " << forgery;
      if (!load(forged)) {
        ++refused;
        continue;
      }
      EXPECT_TRUE(forgery >= 0 && forgery <= 1e18) << what.str() << " was taken";
      if (name == "step") continue;  // another step draws and warms up otherwise
      expect_lawful_step(at, what.str());
      ASSERT_TRUE(load(good));
    }
  }
  EXPECT_GE(refused, 6);  // of the number of the step alone
}

// Descending regions would overlap, and count entries twice.
TEST(ForgedState, RegionsMustAscend) {
  const Layout layout({{"a.weight", {40, 50}}});
  Reducer reducer(layout, "ok_topk:density=0.1");
  State state = state_of(reducer);
  std::swap(state["ok_topk.bound.3"], state["ok_topk.bound.9"]);
  for (const auto purpose : {StateVisitor::Purpose::check, StateVisitor::Purpose::load}) {
    Loader loader(state, purpose);
    EXPECT_THROW(reducer.visit(loader), std::invalid_argument);
  }
  // The visit that loads was broken off half way: nothing may go on with that.
  run_ranks(1, [&](Communicator& comm) { EXPECT_THROW(reducer.begin(comm), std::runtime_error); });
  const State good = state_of(*std::make_unique<Reducer>(layout, "ok_topk:density=0.1"));
  Loader loader(good);
  reducer.visit(loader);
  run_ranks(1, [&](Communicator& comm) { reducer.begin(comm); });
}

}  // namespace
}  // namespace topreduce::laws
