// Ranks die, others come: the survivors agree on the last step, one that missed its vote commits it
// too, and what is owed keeps its mean.

#include "topreduce/rebuild.h"

#include <cmath>
#include <memory>

#include "cluster.h"
#include "expect_error.h"
#include "topreduce/comm/decorator.h"

namespace topreduce::laws {
namespace {

using Role = RebuildPlan::Role;
constexpr std::uint32_t kVote = 0xfffffffe;  // the exchange of its messages

/// A rank that dies in the vote, or in the round that follows it, after so many messages of it: its
/// word reaches as many ranks above it, in turn, and no others.
class DiesInVote final : public comm::Decorator {
 public:
  DiesInVote(Communicator& inner, int heard) : Decorator(inner), left_(heard) {}

  void post(int peer, const comm::Tag& tag, std::span<const std::byte> head,
            std::span<const std::byte> bytes) override {
    votes_ = votes_ || tag.exchange == kVote;
    if (votes_ && left_-- == 0) {
      flush();
      throw CommError("killed");
    }
    Decorator::post(peer, tag, head, bytes);
  }

 private:
  int left_;
  bool votes_ = false;
};

/// A rank that dies after so many messages.
class Dies final : public comm::Decorator {
 public:
  Dies(Communicator& inner, int after) : Decorator(inner), left_(after) {}

  void post(int peer, const comm::Tag& tag, std::span<const std::byte> head,
            std::span<const std::byte> bytes) override {
    if (left_-- == 0) {
      flush();
      throw CommError("killed");
    }
    Decorator::post(peer, tag, head, bytes);
  }

 private:
  int left_;
};

/// What a rank has after it was rebuilt.
struct Rebuilt {
  RebuildPlan plan;
  Floats late_mean;
};

/// All of these go on together, in this order.
std::vector<Rebuilt> rebuild(std::span<Reducer* const> reducers) {
  std::vector<Rebuilt> all(reducers.size());
  run_ranks(static_cast<int>(reducers.size()), [&](Communicator& comm) {
    Rebuilt& mine = all[static_cast<std::size_t>(comm.rank())];
    Reducer& reducer = *reducers[static_cast<std::size_t>(comm.rank())];
    mine.plan = reducer.plan_rebuild(comm);
    const auto mean = reducer.rebuild(comm, mine.plan);
    mine.late_mean.assign(mean.begin(), mean.end());
  });
  return all;
}

/// A whole step of such ranks; means by rank.
std::vector<Floats> step(std::span<Reducer* const> reducers, const Layout& layout, int number) {
  std::vector<Floats> gradients;
  for (std::size_t r = 0; r < reducers.size(); ++r) {
    gradients.push_back(heavy_tailed(static_cast<int>(r), number, layout));
  }
  run_ranks(static_cast<int>(reducers.size()), [&](Communicator& comm) {
    const auto r = static_cast<std::size_t>(comm.rank());
    reducers[r]->average(comm, gradients[r]);
  });
  return gradients;
}

Floats mean_owed(std::span<Reducer* const> reducers) {
  std::vector<double> sum;
  for (Reducer* reducer : reducers) {
    const auto owed = reducer->owed();
    sum.resize(owed.size());
    for (std::size_t i = 0; i < owed.size(); ++i) sum[i] += owed[i];
  }
  Floats mean;
  for (const double x : sum) {
    mean.push_back(static_cast<float>(x / static_cast<double>(reducers.size())));
  }
  return mean;
}

class Rebuild : public testing::TestWithParam<const char*> {
 protected:
  /// Three steps, and a fourth in whose vote the last rank dies; `heard`: how many ranks get its
  /// word. The same steps of `spared` go through.
  void lose_the_last(int ranks, int heard, Handing handing) {
    cluster_ = std::make_unique<Cluster>(ranks, layout_, GetParam());
    spared_ = std::make_unique<Cluster>(ranks, layout_, GetParam());
    cluster_->hand_over_by(handing);
    for (int s = 0; s < 4; ++s) {
      const auto given =
          gradients_of(ranks, s, [&](int r, int t) { return heavy_tailed(r, t, layout_); });
      const Wrap kill = [&](Communicator& comm) -> std::unique_ptr<Communicator> {
        if (s < 3 || comm.rank() != ranks - 1) return nullptr;
        return std::make_unique<DiesInVote>(comm, heard);
      };
      outcomes_ = cluster_->step(given, cut_, 1, kill);
      want_ = spared_->step(given, cut_);
      for (int r = 0; r + 1 < ranks; ++r) {
        // Its words go to the ranks above it, which are 0, 1, and so on.
        const bool commits = s < 3 || r < heard;
        EXPECT_EQ(outcomes_[static_cast<std::size_t>(r)].failed(), !commits) << "rank " << r;
      }
    }
    survivors_.clear();
    for (int r = 0; r + 1 < ranks; ++r) survivors_.push_back(&(*cluster_)[r]);
  }

  const Layout layout_ = small_model();
  const Cut cut_ = three_buckets(layout_);
  std::unique_ptr<Cluster> cluster_, spared_;
  std::vector<Outcome> outcomes_, want_;
  std::vector<Reducer*> survivors_;
};

// Whoever missed the last word has all sums: it commits them, to the same bits.
TEST_P(Rebuild, WhoIsOneCommitBehindCommitsTheSame) {
  for (const Handing handing : {Handing::add, Handing::lend, Handing::lend_and_deliver}) {
    for (const int heard : {1, 2}) {
      lose_the_last(4, heard, handing);
      const auto rebuilt = rebuild(survivors_);
      for (std::size_t r = 0; r < rebuilt.size(); ++r) {
        const bool late = static_cast<int>(r) >= heard;
        SCOPED_TRACE("rank " + std::to_string(r));
        EXPECT_EQ(rebuilt[r].plan.step, 4u);
        EXPECT_EQ(rebuilt[r].plan.leader, 0);
        EXPECT_EQ(rebuilt[r].plan.lost, 1);
        EXPECT_EQ(rebuilt[r].plan.roles[r], late ? Role::late : Role::on_time);
        EXPECT_EQ(rebuilt[r].plan.scale(), 1);
        EXPECT_EQ(survivors_[r]->step(), 4u);
        EXPECT_TRUE(same_bits(survivors_[r]->owed(), want_[r].owed));
        EXPECT_TRUE(same_bits(rebuilt[r].late_mean, late ? want_[r].gradient : Floats()));
      }
      for (int s = 4; s < 7; ++s) {
        const auto means = step(survivors_, layout_, s);
        for (const Floats& mean : means) EXPECT_TRUE(same_bits(mean, means[0]));
      }
    }
  }
}

// Nobody has committed: the step is made again, and what went wrong leaves no trace.
TEST_P(Rebuild, AStepThatNobodyCommittedIsMadeAgain) {
  lose_the_last(3, 0, Handing::lend);
  // The same three, as after a pause.
  std::vector<Reducer*> all;
  for (Reducer& reducer : cluster_->reducers()) all.push_back(&reducer);
  const auto rebuilt = rebuild(all);
  EXPECT_TRUE(rebuilt[0].plan.same_ranks());
  EXPECT_EQ(rebuilt[0].plan.count(Role::on_time), 3);
  for (int s = 3; s < 6; ++s) {
    const auto given =
        gradients_of(3, s, [&](int r, int t) { return heavy_tailed(r, t, layout_); });
    const auto got = cluster_->step(given, cut_);
    if (s > 3) want_ = spared_->step(given, cut_);
    for (std::size_t r = 0; r < got.size(); ++r) {
      EXPECT_TRUE(same_bits(got[r].gradient, want_[r].gradient)) << "step " << s;
      EXPECT_EQ(got[r].state, want_[r].state) << "step " << s;
    }
  }
}

// One is lost and two come: they owe nothing, and the mean of what is owed stays.
TEST_P(Rebuild, WhoJoinsOwesNothing) {
  lose_the_last(4, 2, Handing::add);
  Cluster others(2, layout_, GetParam());
  std::vector<Reducer*> all = survivors_;
  std::vector<Reducer*> twins;
  for (int r = 0; r < 3; ++r) twins.push_back(&(*spared_)[r]);
  const Floats wanted = mean_owed(twins);
  all.insert(all.begin(), &others[0]);
  all.push_back(&others[1]);
  const auto rebuilt = rebuild(all);
  const RebuildPlan& plan = rebuilt[0].plan;
  EXPECT_EQ(plan.roles,
            (std::vector{Role::joins, Role::on_time, Role::on_time, Role::late, Role::joins}));
  EXPECT_EQ(plan.leader, 1);
  EXPECT_EQ(plan.lost, 1);
  EXPECT_EQ(plan.scale(), 5.0f / 3);
  const Floats after = mean_owed(all);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    float largest = 0;
    for (const Reducer* twin : twins) largest = std::max(largest, std::abs(twin->owed()[i]));
    EXPECT_NEAR(after[i], wanted[i], 1e-6 * largest);
  }
  double energy = 0;
  for (const std::size_t r : {std::size_t{0}, std::size_t{4}}) {
    EXPECT_EQ(all[r]->step(), 4u);
    EXPECT_EQ(energy_of(all[r]->owed()), 0);
  }
  for (const Reducer* twin : twins) energy += energy_of(twin->owed()) / 3;
  // The late one tells what it owed before.
  EXPECT_NEAR(plan.lost_norm, std::sqrt(energy), 0.5 * std::sqrt(energy));
  const bool exact = feedback_name(*all[0]) == "residual";
  for (int s = 4; s < 8; ++s) {
    const Floats owed_before = mean_owed(all);
    std::vector<Floats> owed;
    for (const Reducer* one : all) owed.emplace_back(one->owed().begin(), one->owed().end());
    const auto given =
        gradients_of(5, s, [&](int r, int t) { return heavy_tailed(r, t, layout_); });
    const auto means = step(all, layout_, s);
    for (const Floats& mean : means) EXPECT_TRUE(same_bits(mean, means[0]));
    if (!exact) continue;
    // Nothing is lost from here on: mean of owed + gradients = mean applied + mean still owed.
    const Floats owed_after = mean_owed(all);
    const auto places = places_in_memory(*all[0]);
    for (std::size_t i = 0; i < places.size(); ++i) {
      if (places[i] == kNotRemembered) continue;
      double mean = 0, largest = 0;
      for (std::size_t r = 0; r < 5; ++r) {
        mean += given[r][i] / 5.0;
        largest =
            std::max({largest, std::abs(given[r][i] * 1.0), std::abs(owed[r][places[i]] * 1.0)});
      }
      const double left = owed_before[places[i]] + mean - means[0][i] - owed_after[places[i]];
      EXPECT_NEAR(left, 0, 1e-5 * largest);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, Rebuild, testing::ValuesIn(fewer_rows()),
                         [](const auto& row) { return name_of(row.param); });

class RebuildThatFails : public Rebuild {};

// Wherever a rank dies in a rebuild, those who are left go on with the same: some may have gone
// through with it, and others not.
TEST_P(RebuildThatFails, WhoDiesInARebuildLeavesTheOthersAlike) {
  int parted = 0;
  for (int after = 0, died = 1; died > 0; ++after) {
    SCOPED_TRACE("dies after " + std::to_string(after) + " messages");
    lose_the_last(4, 1, Handing::lend);
    Reducer newcomer(layout_, survivors_[0]->spec());
    std::vector<Reducer*> four = survivors_, three = {survivors_[0], survivors_[1], &newcomer};
    four.push_back(&newcomer);
    std::vector<char> through(4);
    run_ranks(4, [&](Communicator& inner) {
      const auto r = static_cast<std::size_t>(inner.rank());
      std::unique_ptr<Communicator> dying;
      if (r == 2) dying = std::make_unique<Dies>(inner, after);
      Communicator& comm = dying ? *dying : inner;
      try {
        four[r]->rebuild(comm, four[r]->plan_rebuild(comm));
        through[r] = 1;
      } catch (const CommError&) {
      }
    });
    died = 1 - through[2];
    const bool any = through[0] + through[1] + through[3] > 0;
    parted += any && through[0] + through[1] + through[3] < 3;
    const auto rebuilt = rebuild(three);
    EXPECT_EQ(rebuilt[0].plan.lost, 1 + !any);
    if (feedback_name(*three[0]) == "residual") {
      for (std::size_t r = 0; r < 2; ++r) {
        Floats owed = want_[r].owed;
        for (float& x : owed) x *= any ? 4.0f / 3 : 3.0f / 2;
        EXPECT_TRUE(same_bits(three[r]->owed(), owed)) << "rank " << r;
      }
      EXPECT_EQ(energy_of(newcomer.owed()), 0);
    }
    EXPECT_TRUE(same_bits(rebuilt[1].late_mean, through[1] ? Floats() : want_[1].gradient));
    for (int s = 4; s < 7; ++s) {
      const auto means = step(three, layout_, s);
      for (const Floats& mean : means) EXPECT_TRUE(same_bits(mean, means[0])) << "step " << s;
    }
  }
  EXPECT_GT(parted, 0);
}

INSTANTIATE_TEST_SUITE_P(Some, RebuildThatFails,
                         testing::Values("topk:density=0.05,values=fp32",
                                         "topk:density=0.05,feedback=ef21,values=fp32",
                                         "ok_topk:density=0.2,period=3,tau=2,balance=1"),
                         [](const auto& row) { return name_of(row.param); });

class RebuildOf : public testing::Test {
 protected:
  const Layout layout_ = small_model();
};

// Two rounds of the vote: the last one is where ranks part.
TEST_F(RebuildOf, NineRanks) {
  const Cut cut = three_buckets(layout_);
  for (const int heard : {7, 8, 6}) {
    Cluster cluster(9, layout_, "topk:density=0.05"), spared(9, layout_, "topk:density=0.05");
    const auto given =
        gradients_of(9, 0, [&](int r, int t) { return heavy_tailed(r, t, layout_); });
    const auto outcomes = cluster.step(given, cut, 1, [&](Communicator& comm) {
      return comm.rank() == 8 ? std::make_unique<DiesInVote>(comm, heard) : nullptr;
    });
    const auto want = spared.step(given, cut);
    std::vector<Reducer*> survivors;
    bool any = false;
    for (int r = 0; r < 8; ++r) {
      survivors.push_back(&cluster[r]);
      any = any || !outcomes[static_cast<std::size_t>(r)].failed();
    }
    rebuild(survivors);
    for (std::size_t r = 0; r < 8; ++r) {
      EXPECT_EQ(survivors[r]->step(), any ? 1u : 0u);
      if (!any) continue;
      EXPECT_TRUE(same_bits(survivors[r]->owed(), want[r].owed)) << "rank " << r;
    }
  }
}

// What nobody used stays owed on the late rank too, and it divides by what the others divided by:
// the round that tells these things is the one it missed.
TEST_F(RebuildOf, RanksThatLeaveParametersUnused) {
  const Cut cut = three_buckets(layout_);
  const std::size_t unused[] = {1, 3};
  const std::vector<Participation> says(
      3, {.divisor = Participation::Divisor::ranks, .unused = unused});
  for (const Handing handing : {Handing::add, Handing::lend}) {
    Cluster cluster(3, layout_, "topk:density=0.2"), spared(3, layout_, "topk:density=0.2");
    cluster.hand_over_by(handing);
    for (int s = 0; s < 2; ++s) {
      const auto given =
          gradients_of(3, s, [&](int r, int t) { return heavy_tailed(r, t, layout_); });
      const auto outcomes = cluster.step(
          given, cut, 1,
          [&](Communicator& comm) -> std::unique_ptr<Communicator> {
            if (s == 0 || comm.rank() != 2) return nullptr;
            return std::make_unique<DiesInVote>(comm, 3);  // two words, one of what it used
          },
          says);
      const auto want = spared.step(given, cut, 1, {}, says);
      if (s == 0) continue;
      EXPECT_NE(outcomes[0].failed(), outcomes[1].failed());
      std::vector<Reducer*> survivors = {&cluster[0], &cluster[1]};
      rebuild(survivors);
      for (std::size_t r = 0; r < 2; ++r) {
        EXPECT_EQ(survivors[r]->step(), 2u);
        EXPECT_TRUE(same_bits(survivors[r]->owed(), want[r].owed)) << "rank " << r;
      }
    }
  }
}

// The one that tells of the last vote has joined since then, and heard of it itself.
TEST_F(RebuildOf, ALateRankThatComesLater) {
  const Cut cut = three_buckets(layout_);
  const std::size_t unused[] = {2};
  const std::vector<Participation> says(3, {.unused = unused});
  Cluster cluster(3, layout_, "topk:density=0.2"), spared(3, layout_, "topk:density=0.2");
  const auto given = gradients_of(3, 0, [&](int r, int t) { return heavy_tailed(r, t, layout_); });
  const auto outcomes = cluster.step(
      given, cut, 1,
      [&](Communicator& comm) -> std::unique_ptr<Communicator> {
        return comm.rank() == 2 ? std::make_unique<DiesInVote>(comm, 3) : nullptr;
      },
      says);
  const auto want = spared.step(given, cut, 1, {}, says);
  const bool first_is_late = outcomes[0].failed();
  ASSERT_NE(first_is_late, outcomes[1].failed());
  Reducer& ahead = cluster[first_is_late ? 1 : 0];
  Reducer& behind = cluster[first_is_late ? 0 : 1];
  const std::size_t late = first_is_late ? 0 : 1;
  Reducer newcomer(layout_, cluster[0].spec());
  std::vector<Reducer*> two = {&newcomer, &ahead}, three = {&newcomer, &ahead, &behind};
  EXPECT_EQ(rebuild(two)[0].plan.leader, 1);
  const auto rebuilt = rebuild(three);
  EXPECT_EQ(rebuilt[0].plan.roles, (std::vector{Role::on_time, Role::on_time, Role::late}));
  EXPECT_EQ(rebuilt[0].plan.leader, 0);
  EXPECT_TRUE(same_bits(behind.owed(), want[late].owed));
  EXPECT_EQ(behind.step(), 1u);
}

TEST_F(RebuildOf, RanksWithOtherSettingsIsRefused) {
  Reducer one(layout_, "topk:density=0.05"), other(layout_, "topk:density=0.1");
  run_ranks(2, [&](Communicator& comm) {
    expect_error([&] { (comm.rank() == 0 ? one : other).plan_rebuild(comm); },
                 {"the ranks do not agree", "density = 0.1"});
  });
}

TEST_F(RebuildOf, ASurvivorAloneGoesOn) {
  Cluster cluster(2, layout_, "topk:density=0.05,values=fp32");
  std::vector<Reducer*> both = {&cluster[0], &cluster[1]};
  for (int s = 0; s < 3; ++s) step(both, layout_, s);
  const Floats owed(cluster[0].owed().begin(), cluster[0].owed().end());
  std::vector<Reducer*> alone = {&cluster[0]};
  const auto rebuilt = rebuild(alone);
  EXPECT_EQ(rebuilt[0].plan.lost, 1);
  EXPECT_TRUE(same_bits(cluster[0].owed(), owed));
  const auto mean = step(alone, layout_, 3);
  EXPECT_EQ(cluster[0].step(), 4u);
}

}  // namespace
}  // namespace topreduce::laws
