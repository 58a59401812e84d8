// What is finite: not only what a rank brings, but every sum that is made of it, and what callers
// are handed. A step that would overflow anywhere is NaN on all ranks and leaves no trace.

#include <cmath>
#include <limits>

#include "cluster.h"
#include "topreduce/reducer.h"

namespace topreduce::laws {
namespace {

constexpr float kHalf = 65504;  // the largest of fp16

class Overflow : public testing::TestWithParam<const char*> {
 protected:
  static bool all_finite(const Outcome& outcome) {
    const auto finite = [](float x) { return std::isfinite(x); };
    return std::ranges::all_of(outcome.gradient, finite) &&
           std::ranges::all_of(outcome.owed, finite);
  }
};

INSTANTIATE_TEST_SUITE_P(Rows, Overflow, testing::ValuesIn(fewer_rows()),
                         [](const auto& test) { return name_of(test.param); });

// Values near the largest float, once and again, with and without a loss scale.
TEST_P(Overflow, SumsAreSeenByTheVote) {
  const Layout layout = small_model();
  const Cut cut = three_buckets(layout);
  for (const int ranks : {2, 3}) {
    for (const float scale : {1.0f, 65536.0f}) {
      Cluster cluster(ranks, layout, GetParam());
      bool refused = false;
      for (int s = 0; s < 8; ++s) {
        auto gradients = gradients_of(
            ranks, s, [&](int rank, int at) { return heavy_tailed(rank, at, layout); });
        for (Floats& gradient : gradients) {
          for (float& x : gradient) x = std::clamp(x, -3.0f, 3.0f) * scale;
          // From harmless to the largest, at two places, on all ranks alike or against each other.
          const float large[] = {1e20f, 3e38f, -3e38f, 1e37f};
          if (s % 2 == 1) gradient[30] = gradient[200] = large[s / 2 % 4];
        }
        if (s == 5) gradients[0][30] = -gradients[0][30];
        const auto outcomes = cluster.step(gradients, cut, scale);
        for (const Outcome& outcome : outcomes) {
          ASSERT_EQ(outcome.stats.finite, outcomes[0].stats.finite) << "step " << s;
          ASSERT_EQ(all_finite(outcome), outcome.stats.finite) << "step " << s;
          for (const auto& [name, bits] : outcome.state) {
            if (bits.size() != outcome.owed.size()) continue;
            for (const float x : floats_of(outcome.state, name)) {
              ASSERT_TRUE(std::isfinite(x)) << name << ", step " << s;
            }
          }
        }
        refused = refused || !outcomes[0].stats.finite;
        ASSERT_TRUE(s % 2 == 1 || outcomes[0].stats.finite) << "step " << s << ": it lasts";
      }
      EXPECT_TRUE(refused);
    }
  }
}

/// A step whose caller goes on in fp16; every rank has its own loss scale.
std::vector<Outcome> step_in_half(Cluster& cluster, const std::vector<Floats>& gradients,
                                  const std::vector<float>& scales,
                                  std::span<const Participation> participation = {}) {
  return meet(cluster.reducers(), [&](Reducer& reducer, Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    Outcome outcome;
    outcome.gradient = gradients[rank];
    try {
      reducer.begin(comm, scales[rank]);
      if (!participation.empty()) reducer.participate(participation[rank]);
      reducer.add(one_bucket(reducer.layout())[0], outcome.gradient, kHalf);
      outcome.stats = reducer.finish();
    } catch (const WireError& error) {
      outcome.error = error.what();
    } catch (const CommError& error) {
      outcome.error = error.what();
    }
    outcome.owed.assign(reducer.owed().begin(), reducer.owed().end());
    outcome.state = state_of(reducer);
    return outcome;
  });
}

// Debts times the loss scale exceed fp16: nothing is committed, and a smaller scale delivers it.
TEST_P(Overflow, IsDecidedOnWhatIsHandedOut) {
  const Layout layout = small_model();
  const int ranks = 3;
  Cluster cluster(ranks, layout, GetParam());
  for (int s = 0; s < 4; ++s) {
    const auto small =
        gradients_of(ranks, s, [&](int rank, int at) { return heavy_tailed(rank, at, layout); });
    step_in_half(cluster, small, {1, 1, 1});
  }
  std::vector<State> before;
  for (Reducer& reducer : cluster.reducers()) before.push_back(state_of(reducer));
  constexpr float kScale = 1024;
  std::vector<Floats> gradients(ranks, Floats(layout.size(), 1e5f * kScale));
  const auto lost = step_in_half(cluster, gradients, {kScale, kScale, kScale});
  for (std::size_t r = 0; r < lost.size(); ++r) {
    ASSERT_FALSE(lost[r].stats.finite);
    ASSERT_EQ(lost[r].state, before[r]);
  }
  for (Floats& gradient : gradients) std::ranges::fill(gradient, 10.0f);
  const auto got = step_in_half(cluster, gradients, {1, 1, 1});
  for (const Outcome& outcome : got) {
    ASSERT_TRUE(outcome.stats.finite);
    for (const float x : outcome.gradient) ASSERT_LE(std::abs(x), kHalf);
  }
}

// A rank that is out of data does not know the scale, and decides as the others do.
TEST_P(Overflow, RanksThatHaveJoinedDecideAlike) {
  const Layout layout = small_model();
  Cluster cluster(3, layout, GetParam());
  const Participation gone{.presence = Participation::Presence::joined, .unused = {}};
  const Participation here;
  for (const int joined : {0, 1, 2}) {
    std::vector<Participation> participation(3, here);
    std::vector<float> scales(3, 1024);
    participation[static_cast<std::size_t>(joined)] = gone;
    scales[static_cast<std::size_t>(joined)] = 0;
    for (const float size : {1.0f, 1e5f}) {
      std::vector<Floats> gradients(3, Floats(layout.size(), size * 1024));
      std::ranges::fill(gradients[static_cast<std::size_t>(joined)], 0.0f);
      const auto outcomes = step_in_half(cluster, gradients, scales, participation);
      for (const Outcome& outcome : outcomes) {
        ASSERT_EQ(outcome.error, "");
        ASSERT_EQ(outcome.stats.finite, outcomes[0].stats.finite);
        ASSERT_TRUE(same_bits(outcome.gradient, outcomes[0].gradient) || !outcome.stats.finite);
      }
      EXPECT_EQ(outcomes[0].stats.finite, size == 1) << "rank " << joined << " has joined";
    }
  }
}

TEST(Overflow, RanksWithDifferentLossScalesFindOut) {
  const Layout layout = small_model();
  Cluster cluster(2, layout, "topk:density=0.1");
  const std::vector<Floats> gradients(2, Floats(layout.size(), 1));
  const auto outcomes = step_in_half(cluster, gradients, {1, 1024});
  for (const Outcome& outcome : outcomes) {
    EXPECT_NE(outcome.error.find("loss scale"), std::string::npos) << outcome.error;
  }
}

}  // namespace
}  // namespace topreduce::laws
