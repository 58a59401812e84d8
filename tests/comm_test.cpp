#include <atomic>
#include <mutex>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "tests/comm_suite.h"
#include "topreduce/comm/self.h"
#include "topreduce/comm/thread.h"

namespace topreduce::comm {
namespace {

// ---- the suite on every transport -----------------------------------------------------------

/// Implements no more than a transport must, so that the defaults of Communicator are run too.
class Minimal : public Communicator {
 public:
  explicit Minimal(Communicator& inner) : inner_(inner) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }

 protected:
  void do_all_to_all(std::span<const std::byte> send, std::span<const std::size_t> counts,
                     Inbox& inbox) override {
    inner_.all_to_all(send, counts, inbox);
  }
  void do_all_gather(std::span<const std::byte> mine, Inbox& inbox) override {
    inner_.all_gather(mine, inbox);
  }

 private:
  Communicator& inner_;
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

TEST_P(ThreadSuite, PassesOnAMinimalTransport) {
  const auto [check, ranks] = GetParam();
  run_ranks(ranks, [run = check.run](Communicator& comm) {
    Minimal minimal(comm);
    run(minimal);
  });
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

// ---- a transport that lies ------------------------------------------------------------------

class Lying final : public Minimal {
 public:
  enum class Lie { too_few_counts, lost_bytes, wrong_own_part, wrapping_counts };
  Lying(Communicator& inner, Lie lie) : Minimal(inner), lie_(lie) {}

 protected:
  void do_all_gather(std::span<const std::byte> mine, Inbox& inbox) override {
    Minimal::do_all_gather(mine, inbox);
    switch (lie_) {
      case Lie::too_few_counts: inbox.counts.pop_back(); break;
      case Lie::lost_bytes: inbox.bytes.pop_back(); break;
      case Lie::wrong_own_part:
        inbox.counts[0] -= 1;
        inbox.counts[1] += 1;
        break;
      case Lie::wrapping_counts:
        inbox.counts[0] += 1;
        inbox.counts[1] = ~std::size_t{0};
        inbox.bytes.resize(inbox.counts[0] - 1);
        break;
    }
  }

 private:
  Lie lie_;
};

TEST(Comm, BelievesNoTransport) {
  using Lie = Lying::Lie;
  for (const Lie lie :
       {Lie::too_few_counts, Lie::lost_bytes, Lie::wrong_own_part, Lie::wrapping_counts}) {
    run_ranks(2, [lie](Communicator& comm) {
      Lying lying(comm, lie);
      Inbox inbox;
      EXPECT_THROW(lying.all_gather(std::vector<std::byte>(8), inbox), CommError);
      EXPECT_EQ(lying.traffic().rounds, 0u);
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
        if (names(text, "rank " + std::to_string(thrower) + " has left")) ++released;
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
        if (names(comm_error_of(comm, call()), "rank 0 has left")) ++released;
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
      EXPECT_TRUE(names(text, "rank 1 called " + theirs)) << text;
      comm.barrier();  // everyone was told, so everyone is still in step
    });
  }
}

TEST(ThreadComm, DestroyingBeforeTheCallIsFoundAtOnce) {
  auto group = make_thread_group(3);
  group[2].reset();
  for (const Call& call : kCalls) {
    EXPECT_TRUE(names(comm_error_of(*group[0], call), "rank 2 has left")) << call.name;
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
    EXPECT_THROW(comm.broadcast(uneven, 0), CommError);
    EXPECT_THROW(comm.broadcast(even, comm.rank()), CommError);
    comm.barrier();
  });
  // The default broadcast finds out where the bytes arrive, and the rank that knows lets go.
  EXPECT_THROW(run_ranks(3,
                         [&](Communicator& comm) {
                           Minimal minimal(comm);
                           std::vector<std::byte> bytes(10 + by_rank(comm));
                           minimal.broadcast(bytes, 0);
                           minimal.barrier();
                         }),
               CommError);
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
