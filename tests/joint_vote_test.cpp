// A model in parts that are averaged apart from each other: a step happens in all of them or in
// none.

#include "topreduce/joint_vote.h"

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>

#include <gtest/gtest.h>

#include "topreduce/comm/decorator.h"
#include "topreduce/comm/thread.h"
#include "topreduce/errors.h"
#include "topreduce/reducer.h"

namespace topreduce {
namespace {

using comm::at;

constexpr int kReplicas = 3, kShards = 2, kRanks = kReplicas * kShards;

/// Runs `body(rank, replicas, shards)` on a grid of threads; each destroys its communicators when
/// it throws, as processes do that give up.
template <class Body>
void run_grid(Body&& body) {
  std::vector<std::unique_ptr<Communicator>> replicas(kRanks), shards(kRanks);
  for (int s = 0; s < kShards; ++s) {
    auto group = comm::make_thread_group(kReplicas);
    for (int r = 0; r < kReplicas; ++r) replicas[at(r * kShards + s)] = std::move(group[at(r)]);
  }
  for (int r = 0; r < kReplicas; ++r) {
    auto group = comm::make_thread_group(kShards);
    for (int s = 0; s < kShards; ++s) shards[at(r * kShards + s)] = std::move(group[at(s)]);
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      body(rank, *replicas[at(rank)], *shards[at(rank)]);
      replicas[at(rank)].reset();
      shards[at(rank)].reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The shards differ in size, as those of an uneven model do.
Layout layout_of(int rank) {
  const std::size_t rows = rank % kShards == 0 ? 40 : 7;
  return Layout({{"weight", {rows, 5}}, {"bias", {rows}}});
}

std::vector<float> gradient_of(int rank, int step, std::size_t size) {
  std::vector<float> gradient(size);
  for (std::size_t i = 0; i < size; ++i) {
    gradient[i] = static_cast<float>((i * 7 + static_cast<std::size_t>(rank * 3 + step)) % 11) - 5;
  }
  return gradient;
}

TEST(JointVote, AnInfinityInOnePartIsHeardInAll) {
  for (int culprit = 0; culprit < kRanks; ++culprit) {
    run_grid([&](int rank, Communicator& replicas, Communicator& shards) {
      Reducer reducer(layout_of(rank), "topk:density=0.1");
      reducer.commit_with(&shards);
      for (int step = 0; step < 4; ++step) {
        auto gradient = gradient_of(rank, step, reducer.layout().size());
        const bool lost = step == 2;
        if (lost && rank == culprit) gradient[3] = std::numeric_limits<float>::infinity();
        const std::vector<float> before(reducer.owed().begin(), reducer.owed().end());
        const StepStats& stats = reducer.average(replicas, gradient);
        EXPECT_EQ(stats.finite, !lost) << "rank " << rank << ", culprit " << culprit;
        EXPECT_EQ(std::isnan(gradient[0]), lost);
        const std::vector<float> after(reducer.owed().begin(), reducer.owed().end());
        EXPECT_EQ(before == after, lost);
        EXPECT_EQ(stats.messages_inside, kShards - 1);
        EXPECT_GT(stats.bytes_inside, 20);
        EXPECT_LT(stats.bytes_inside, 100);
      }
      EXPECT_EQ(reducer.step(), 3);
    });
  }
}

// One that gives up before the vote, in its part of the model: no other part has committed.
TEST(JointVote, AFailureInOnePartCommitsNowhere) {
  for (int culprit = 0; culprit < kRanks; ++culprit) {
    std::atomic<int> failed = 0;
    run_grid([&](int rank, Communicator& replicas, Communicator& shards) {
      Reducer reducer(layout_of(rank), "topk:density=0.1");
      reducer.commit_with(&shards);
      std::vector<float> before;
      try {
        for (int step = 0; step < 4; ++step) {
          auto gradient = gradient_of(rank, step, reducer.layout().size());
          if (step == 2 && rank == culprit) throw CommError("pulled the plug");
          before.assign(reducer.owed().begin(), reducer.owed().end());
          reducer.average(replicas, gradient);
        }
      } catch (const CommError&) {
        ++failed;
      }
      EXPECT_EQ(reducer.step(), 2) << "rank " << rank << ", culprit " << culprit;
      if (rank != culprit) {
        EXPECT_EQ(before, std::vector<float>(reducer.owed().begin(), reducer.owed().end()));
      }
    });
    EXPECT_EQ(failed, kRanks);
  }
}

TEST(JointVote, PartsAtDifferentStepsDoNotCommit) {
  std::atomic<int> refused = 0;
  run_grid([&](int rank, Communicator& replicas, Communicator& shards) {
    Reducer reducer(layout_of(rank), "topk:density=0.1");
    reducer.commit_with(&shards);
    if (rank % kShards == 1) reducer.skip_to(5);
    auto gradient = gradient_of(rank, 0, reducer.layout().size());
    const std::uint64_t step = reducer.step();
    try {
      reducer.average(replicas, gradient);
    } catch (const std::exception&) {
      ++refused;
    }
    EXPECT_EQ(reducer.step(), step);
  });
  EXPECT_EQ(refused, kRanks);
}

TEST(JointVote, CannotChangeInAStep) {
  comm::run_ranks(1, [](Communicator& comm) {
    Reducer reducer(layout_of(0), "topk");
    reducer.begin(comm);
    EXPECT_THROW(reducer.commit_with(&comm), std::invalid_argument);
  });
}

}  // namespace
}  // namespace topreduce
