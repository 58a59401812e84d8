// The vote at the end of a step: what one rank says reaches all, in few and short messages.

#include "topreduce/vote.h"

#include <atomic>

#include <gtest/gtest.h>

#include "sanitized.h"
#include "topreduce/comm/decorator.h"
#include "topreduce/comm/self.h"
#include "topreduce/comm/thread.h"
#include "topreduce/errors.h"

namespace topreduce {
namespace {

const std::vector<int> kSizes =
    kSanitized ? std::vector{1, 2, 3, 8, 9, 17} : std::vector{1, 2, 3, 8, 9, 17, 64, 65};

std::uint64_t rounds_of(int ranks) {
  std::uint64_t rounds = 0;
  for (int heard = 1; heard < ranks; heard *= 8) ++rounds;
  return rounds;
}

/// Holds votes in one group, one after the other: ballot(rank, which), then check(vote, which).
template <class BallotOf, class Check>
void hold_votes(int ranks, int votes, BallotOf&& ballot_of, Check&& check) {
  run_ranks(ranks, [&](Communicator& comm) {
    StepVote vote;
    for (int i = 0; i < votes; ++i) {
      comm.enter({comm::Place::Kind::step, static_cast<std::uint64_t>(i)});
      vote.begin(3, ranks);
      const std::uint64_t before = comm.traffic().messages;
      const std::uint64_t rounds = vote.hold(ballot_of(comm.rank(), i), comm);
      EXPECT_EQ(rounds, rounds_of(ranks));
      EXPECT_LE(comm.traffic().messages - before, 7 * rounds);
      check(vote, i);
    }
  });
}

// Of every rank in turn, and of none.
TEST(StepVote, OneNotFiniteReachesEveryone) {
  for (const int ranks : kSizes) {
    hold_votes(
        ranks, ranks + 1,
        [](int rank, int which) {
          return StepVote::Ballot{.run = 7, .step = 3, .finite = rank != which};
        },
        [&](const StepVote& vote, int which) {
          EXPECT_EQ(vote.finite(), which == ranks) << ranks << " ranks, vote " << which;
        });
  }
}

TEST(StepVote, OneThatKnowsTheScaleTellsEveryone) {
  for (const int ranks : kSizes) {
    hold_votes(
        ranks, ranks,
        [](int rank, int which) {
          return StepVote::Ballot{.loss_scale = rank == which ? 512.0f : 0.0f, .one_scale = true};
        },
        [&](const StepVote& vote, int) { EXPECT_EQ(vote.loss_scale(), 512.0f); });
  }
}

// The longest computing and the shortest wait, of whichever rank; the same numbers everywhere.
TEST(StepVote, WhatRanksMeasuredIsMerged) {
  for (const int ranks : kSizes) {
    hold_votes(
        ranks, ranks,
        [&](int rank, int which) {
          const double odd = rank == which ? 0.7 : 0.3, other = rank == which ? 0.1 : 0.2;
          return StepVote::Ballot{.measured = tuning::Measurement{.computed = odd,
                                                                  .waited = other,
                                                                  .exchanging = other,
                                                                  .overlap = odd,
                                                                  .bytes = 1000 * odd,
                                                                  .busy = odd}};
        },
        [&](const StepVote& vote, int) {
          const tuning::Measurement measured = vote.measured().value();
          EXPECT_EQ(measured.computed, 0.7f);
          EXPECT_EQ(measured.waited, 0.1f);
          EXPECT_EQ(measured.exchanging, 0.1f);
          EXPECT_EQ(measured.overlap, 0.7f);
          EXPECT_EQ(measured.bytes, 700.0f);
          EXPECT_EQ(measured.busy, 0.7f);
          EXPECT_TRUE(measured.known());
        });
  }
  hold_votes(
      3, 1, [](int, int) { return StepVote::Ballot{}; },
      [](const StepVote& vote, int) { EXPECT_FALSE(vote.measured()); });
}

/// Every rank must get WireError that holds `word` if rank `odd` alone votes otherwise.
template <class BallotOf>
void expect_all_told(int ranks, const char* word, BallotOf&& ballot_of) {
  for (int odd = 0; odd < ranks; odd += 1 + ranks / 4) {
    std::atomic<int> told = 0;
    run_ranks(ranks, [&](Communicator& comm) {
      comm.enter({comm::Place::Kind::step, 0});
      StepVote vote;
      vote.begin(1, ranks);
      try {
        vote.hold(ballot_of(comm.rank() == odd), comm);
      } catch (const WireError& error) {
        if (std::string(error.what()).find(word) != std::string::npos) ++told;
      }
      comm.barrier();
    });
    EXPECT_EQ(told, ranks) << word;
  }
}

TEST(StepVote, DifferencesAreToldToAll) {
  for (const int ranks : kSizes) {
    if (ranks == 1) continue;
    hold_votes(
        ranks, ranks,
        [](int rank, int which) { return StepVote::Ballot{.alike = rank == which ? 8u : 9u}; },
        [&](const StepVote& vote, int) { EXPECT_FALSE(vote.alike()); });
    expect_all_told(ranks, "loss scales", [](bool odd) {
      return StepVote::Ballot{.loss_scale = odd ? 2.0f : 4.0f, .one_scale = true};
    });
  }
}

TEST(StepVote, OneThatAsksMakesARoundForAll) {
  for (const int ranks : kSizes) {
    const std::size_t unused[] = {1};
    run_ranks(ranks, [&](Communicator& comm) {
      comm.enter({comm::Place::Kind::step, 0});
      StepVote vote;
      vote.begin(3, ranks);
      // Everyone leaves parameter 1 unused, and one its others; that one is not present.
      vote.note({.presence = comm.rank() == ranks / 2 ? Participation::Presence::joined
                                                      : Participation::Presence::present,
                 .divisor = Participation::Divisor::present,
                 .unused = unused});
      EXPECT_EQ(vote.hold({}, comm), rounds_of(ranks) + 1);
      EXPECT_EQ(vote.divisor(), std::max(1, ranks - 1));
      EXPECT_FALSE(vote.used(1));
      EXPECT_EQ(vote.used(0), ranks > 1);
      EXPECT_EQ(vote.all_used(), false);
    });
  }
}

/// Changes a byte of each vote of rank 1.
class DamagingVotes final : public comm::Decorator {
 public:
  using Decorator::Decorator;
  void post(int peer, const comm::Tag& tag, std::span<const std::byte> head,
            std::span<const std::byte> bytes) override {
    Bytes damaged(bytes.begin(), bytes.end());
    if (rank() == 1) damaged[0] ^= std::byte{1};
    Decorator::post(peer, tag, head, damaged);
  }
};

TEST(StepVote, DamageIsFoundAndItsSenderNamed) {
  std::atomic<int> named = 0;
  EXPECT_NO_THROW(run_ranks(3, [&](Communicator& inner) {
    DamagingVotes comm(inner);
    comm.enter({comm::Place::Kind::step, 5});
    StepVote vote;
    vote.begin(1, 3);
    try {
      vote.hold({.step = 5}, comm);
      EXPECT_EQ(comm.rank(), 1);  // what it hears is right
    } catch (const WireError& error) {
      const std::string text = error.what();
      if (text.find("step 5, the vote of rank 1: ") != std::string::npos) ++named;
    }
    inner.barrier();
  }));
  EXPECT_EQ(named, 2);
}

}  // namespace
}  // namespace topreduce
