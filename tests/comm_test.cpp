#include <atomic>
#include <mutex>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "tests/comm_suite.h"
#include "topreduce/comm/decorator.h"
#include "topreduce/comm/self.h"
#include "topreduce/comm/thread.h"

namespace topreduce::comm {
namespace {

// ---- the suite on every transport -----------------------------------------------------------

/// Cuts what is sent into short frames, in the middle of messages and of their heads.
class Cutting final : public Decorator {
 public:
  Cutting(Communicator& inner, std::size_t limit) : Decorator(inner), limit_(limit) {}

 protected:
  std::size_t frame_limit() const override { return limit_; }

 private:
  std::size_t limit_;
};

class SelfSuite : public testing::TestWithParam<suite::Check> {};

TEST_P(SelfSuite, Passes) {
  Self self;
  GetParam().run(self);
}

using CheckOnRanks = std::tuple<suite::Check, int>;

std::string name_and_ranks(const testing::TestParamInfo<CheckOnRanks>& test) {
  const auto [check, ranks] = test.param;
  return std::string(check.name) + "_on_" + std::to_string(ranks);
}

class ThreadSuite : public testing::TestWithParam<CheckOnRanks> {};

TEST_P(ThreadSuite, Passes) {
  const auto [check, ranks] = GetParam();
  run_ranks(ranks, check.run);
}

TEST_P(ThreadSuite, PassesInShortFrames) {
  const auto [check, ranks] = GetParam();
  if (check.run == suite::traffic_is_exact) return;  // more frames, more heads
  for (const std::size_t limit : {64u, 1021u}) {
    run_ranks(ranks, [&, run = check.run](Communicator& comm) {
      Cutting cutting(comm, limit);
      run(cutting);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Comm, SelfSuite, testing::ValuesIn(suite::kChecks),
                         [](const auto& test) { return std::string(test.param.name); });
INSTANTIATE_TEST_SUITE_P(Comm, ThreadSuite,
                         testing::Combine(testing::ValuesIn(suite::kChecks),
                                          testing::Values(1, 2, 3, 5, 8)),
                         name_and_ranks);

TEST(ThreadComm, OneCommunicatorPassesTheWholeSuite) {
  run_ranks(3, [](Communicator& comm) {
    for (const auto& check : suite::kChecks) check.run(comm);
  });
}

TEST(Comm, FramesOfAnyLengthGiveTheSameBytes) {
  for (std::size_t limit = Mailbox::kFrameHead + 1; limit < 60; ++limit) {
    run_ranks(3, [limit](Communicator& comm) {
      Cutting cutting(comm, limit);
      suite::messages_may_go_to_some_only(cutting);
      suite::parts_may_be_uneven_and_empty(cutting);
      suite::all_gather_takes_different_lengths(cutting);
    });
  }
}

// ---- a transport that damages ------------------------------------------------------------------

/// Changes every frame that one rank sends.
class Damaging final : public Decorator {
 public:
  using Damage = void (*)(Bytes&);
  Damaging(Communicator& inner, Damage damage) : Decorator(inner), damage_(damage) {}

 protected:
  void send_frame(int peer, std::span<const std::byte> frame) override {
    Bytes copy(frame.begin(), frame.end());
    if (rank() == 1) damage_(copy);
    Decorator::send_frame(peer, copy);
  }

 private:
  Damage damage_;
};

TEST(Comm, DamagedFramesAreFoundAndTheirSenderIsNamed) {
  const Damaging::Damage damages[] = {
      [](Bytes& frame) { frame.resize(3); },
      [](Bytes& frame) { frame[1] ^= std::byte{1}; },                                    // magic
      [](Bytes& frame) { frame[2] ^= std::byte{1}; },                                    // version
      [](Bytes& frame) { frame[3] = std::byte{200}; },                                   // place
      [](Bytes& frame) { std::fill(frame.begin() + 16, frame.end(), std::byte{255}); },  // head
  };
  for (const auto damage : damages) {
    run_ranks(3, [damage](Communicator& comm) {
      Damaging damaging(comm, damage);
      Inbox inbox;
      if (comm.rank() == 1) {
        damaging.all_gather(std::vector<std::byte>(20), inbox);  // what it hears is right
        return;
      }
      try {
        damaging.all_gather(std::vector<std::byte>(20), inbox);
        ADD_FAILURE() << "no error";
      } catch (const WireError& error) {
        EXPECT_NE(std::strstr(error.what(), "rank 1 sent "), nullptr) << error.what();
      }
    });
  }
}

// ---- ranks that leave, fail, or disagree ----------------------------------------------------

using Call = suite::Check;

constexpr Call kCalls[] = {
    {"all_to_all",
     [](Communicator& comm) {
       Inbox inbox;
       const std::vector<std::size_t> counts(static_cast<std::size_t>(comm.size()), 4);
       comm.all_to_all(std::vector<std::byte>(counts.size() * 4), counts, inbox);
     }},
    {"all_gather",
     [](Communicator& comm) {
       Inbox inbox;
       comm.all_gather(std::vector<std::byte>(4), inbox);
     }},
    {"broadcast",
     [](Communicator& comm) {
       std::vector<std::byte> bytes(4);
       comm.broadcast(bytes, 0);
     }},
    {"all_reduce",
     [](Communicator& comm) {
       std::vector<float> values(4);
       comm.all_reduce(values);
     }},
    {"barrier", [](Communicator& comm) { comm.barrier(); }},
};

/// The text of the CommError that `call` throws; empty if it throws none.
std::string comm_error_of(Communicator& comm, const Call& call) {
  try {
    call.run(comm);
  } catch (const CommError& error) {
    return error.what();
  }
  return "";
}

bool names(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string left(int rank) {
  return "rank " + std::to_string(rank) + " has left";
}

class ThreadFailure : public testing::TestWithParam<CheckOnRanks> {
 protected:
  Call call() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Comm, ThreadFailure,
                         testing::Combine(testing::ValuesIn(kCalls), testing::Values(2, 3, 8)),
                         name_and_ranks);

// At once, in the middle of the others' waiting, or after a few rounds together.
TEST_P(ThreadFailure, AThrowingRankReleasesTheOthers) {
  for (const int thrower : {0, ranks() - 1}) {
    for (const int good_rounds : {0, 1, 5}) {
      std::atomic<int> released = 0;
      const auto body = [&](Communicator& comm) {
        for (int round = 0; round < good_rounds; ++round) call().run(comm);
        if (comm.rank() == thrower) throw std::domain_error("own trouble");
        const std::string text = comm_error_of(comm, call());
        if (names(text, left(thrower))) ++released;
        call().run(comm);  // a broken group stays broken
      };
      EXPECT_THROW(run_ranks(ranks(), body), std::domain_error);
      EXPECT_EQ(released, ranks() - 1);
    }
  }
}

TEST_P(ThreadFailure, ARankThatReturnsEarlyReleasesTheOthers) {
  const auto body = [&](Communicator& comm) {
    if (comm.rank() != 0) call().run(comm);
  };
  EXPECT_THROW(run_ranks(ranks(), body), CommError);
}

TEST_P(ThreadFailure, DestroyingWhileOthersWaitReleasesThem) {
  auto group = make_thread_group(ranks());
  std::atomic<int> started = 0, released = 0;
  {
    std::vector<std::jthread> threads;
    for (int r = 1; r < ranks(); ++r) {
      threads.emplace_back([&, &comm = *group[static_cast<std::size_t>(r)]] {
        ++started;
        if (names(comm_error_of(comm, call()), left(0))) ++released;
      });
    }
    while (started != ranks() - 1) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    group[0].reset();
  }
  EXPECT_EQ(released, ranks() - 1);
}

// The last meeting of a group counts for everyone, however fast some ranks leave after it.
TEST_P(ThreadFailure, LeavingAfterTheLastCallHarmsNobody) {
  for (int time = 0; time < 100; ++time) {
    EXPECT_NO_THROW(run_ranks(ranks(), [&](Communicator& comm) { call().run(comm); }));
  }
}

TEST_P(ThreadFailure, DifferentCallsAtTheSameTimeAreFound) {
  for (const Call& other : kCalls) {
    const std::string mine = call().name, theirs = other.name;
    const auto hidden = [](const std::string& name) { return name == "all_reduce"; };
    if (mine == theirs || hidden(mine) || hidden(theirs)) continue;
    run_ranks(ranks(), [&](Communicator& comm) {
      const std::string text = comm_error_of(comm, comm.rank() == 0 ? call() : other);
      EXPECT_TRUE(names(text, "rank 0 called " + mine)) << text;
      const int one = std::max(comm.rank(), 1);
      EXPECT_TRUE(names(text, "rank " + std::to_string(one) + " called " + theirs)) << text;
      comm.barrier();  // everyone was told, so everyone is still in step
    });
  }
}

TEST(ThreadComm, DestroyingBeforeTheCallIsFoundAtOnce) {
  auto group = make_thread_group(3);
  group[2].reset();
  for (const Call& call : kCalls) {
    EXPECT_TRUE(names(comm_error_of(*group[0], call), left(2))) << call.name;
  }
}

TEST(ThreadComm, AllReduceAgainstOtherCallsNeverHangs) {
  for (const Call& other : kCalls) {
    if (std::string_view(other.name) == "all_reduce") continue;
    const auto body = [&](Communicator& comm) {
      std::vector<float> values(7);
      if (comm.rank() == 0) comm.all_reduce(values);
      if (comm.rank() != 0) other.run(comm);
    };
    EXPECT_THROW(run_ranks(3, body), CommError) << other.name;
  }
}

TEST(ThreadComm, DifferentLengthsAndRootsAreFound) {
  const auto by_rank = [](Communicator& comm) { return static_cast<std::size_t>(comm.rank()); };
  EXPECT_THROW(run_ranks(3,
                         [&](Communicator& comm) {
                           std::vector<float> values(10 + by_rank(comm));
                           comm.all_reduce(values);
                         }),
               CommError);
  run_ranks(3, [&](Communicator& comm) {
    std::vector<std::byte> uneven(10 + by_rank(comm)), even(10);
    // Lengths differ where bytes arrive: the root has nothing to compare with.
    if (comm.rank() == 0) comm.broadcast(uneven, 0);
    if (comm.rank() != 0) {
      EXPECT_THROW(comm.broadcast(uneven, 0), CommError);
    }
    EXPECT_THROW(comm.broadcast(even, comm.rank()), CommError);
    comm.barrier();
  });
}

// A peer is missed only by those that wait for it.
TEST(ThreadComm, LosingAPeerOfWhomNothingIsExpectedIsNoError) {
  auto group = make_thread_group(3);
  Communicator &zero = *group[0], &one = *group[1];
  const Tag tag{1, 0}, last{2, 0};
  suite::post_to(*group[2], 0, last);
  group[2]->flush();
  group[2].reset();

  suite::post_to(one, 0, tag);
  one.flush();
  zero.expect(last, 2);  // was here before it left
  zero.expect(tag, 1);
  EXPECT_NO_THROW(zero.poll());
  EXPECT_NO_THROW(zero.wait(tag, 1));
  suite::expect_from(zero, 1, tag);
  suite::expect_from(zero, 2, last);
  suite::post_to(zero, 2, tag);  // and nobody reads it
  EXPECT_NO_THROW(zero.flush());

  zero.expect(tag, 2);
  try {
    zero.poll();
    ADD_FAILURE() << "no error";
  } catch (const CommError& error) {
    EXPECT_TRUE(names(error.what(), left(2))) << error.what();
  }
  zero.enter({Place::Kind::step, 1});  // where nothing is expected yet
  EXPECT_NO_THROW(zero.poll());
}

// It would wait for the one that is gone; it does not, and those that are left are told.
TEST(ThreadComm, PlacesAreComparedWithoutThoseThatLeft) {
  auto group = make_thread_group(3);
  group[2].reset();
  std::atomic<int> told = 0;
  {
    std::vector<std::jthread> threads;
    for (int r = 0; r < 2; ++r) {
      threads.emplace_back([&told, &comm = *group[at(r)]] {
        const int peer = 1 - comm.rank();
        const Tag tag{0, 0};
        comm.enter({Place::Kind::step, static_cast<std::uint64_t>(comm.rank())});
        comm.expect(tag, peer);
        suite::post_to(comm, peer, tag);
        try {
          comm.wait(tag, 1);
        } catch (const std::invalid_argument& error) {
          if (names(error.what(), "rank 2: not heard of")) ++told;
        }
      });
    }
  }
  EXPECT_EQ(told, 2);
}

TEST(ThreadComm, TheCauseIsRethrownNotItsConsequences) {
  const auto wrapped = [](Communicator& comm) {
    if (comm.rank() == 1) throw std::domain_error("cause");
    try {
      comm.barrier();
    } catch (const CommError& error) {
      throw CommError(std::string("step 3: ") + error.what());  // as a reducer would say it
    }
  };
  for (int time = 0; time < 100; ++time) EXPECT_THROW(run_ranks(3, wrapped), std::domain_error);

  // Rank 0 goes without a word, rank 1 waits for it, rank 2 has a trouble of its own later.
  const auto later = [](Communicator& comm) {
    if (comm.rank() == 1) comm.barrier();
    if (comm.rank() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      throw std::domain_error("cause");
    }
  };
  EXPECT_THROW(run_ranks(3, later), std::domain_error);
}

TEST(ThreadComm, RunsEveryRankInItsOwnThread) {
  std::mutex mutex;
  std::set<int> ranks;
  std::set<std::thread::id> threads;
  run_ranks(4, [&](Communicator& comm) {
    EXPECT_EQ(comm.size(), 4);
    {
      const std::lock_guard lock(mutex);
      ranks.insert(comm.rank());
      threads.insert(std::this_thread::get_id());
    }
    comm.barrier();  // all four are alive, so no two share an id
  });
  EXPECT_EQ(ranks, (std::set{0, 1, 2, 3}));
  EXPECT_EQ(threads.size(), 4u);
}

TEST(ThreadComm, AGroupHasAtLeastOneRank) {
  EXPECT_THROW(make_thread_group(0), std::invalid_argument);
  EXPECT_THROW(run_ranks(-1, [](Communicator&) {}), std::invalid_argument);
}

}  // namespace
}  // namespace topreduce::comm
