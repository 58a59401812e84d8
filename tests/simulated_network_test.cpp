// The simulated network: its times are those of the links, and its ranks run the real code.

#include "tests/simulated_network.h"

#include <algorithm>
#include <array>
#include <vector>

#include <gtest/gtest.h>

#include "topreduce/comm/thread.h"
#include "topreduce/reducer.h"

namespace topreduce::simulated {
namespace {

constexpr double kRate = 12.5e6, kLatency = 1e-3;
constexpr comm::Tag kTag{7, 0};

// When `to` has what `from` sent it, all of them at once.
struct Send {
  int from, to;
  std::size_t bytes;
};
std::vector<double> arrivals(const Topology& topology, std::span<const Send> sends) {
  std::vector<double> times(topology.host_of.size());
  Network(topology).run([&](Network::Rank& comm) {
    comm.enter({comm::Place::Kind::step, 0});
    std::size_t awaited = 0;
    for (const Send& send : sends) {
      if (send.to == comm.rank()) {
        comm.expect(kTag, send.from);
        ++awaited;
      }
      if (send.from == comm.rank()) {
        comm.post(send.to, kTag, {}, std::vector<std::byte>(send.bytes));
      }
    }
    comm.wait(kTag, awaited);
    times[at(comm.rank())] = comm.now();
  });
  return times;
}

// What so many bytes of a message take; the heads of frame and message are some bytes more.
double transfer(std::size_t bytes) {
  return on_the_wire(bytes + comm::Mailbox::kFrameHead + 5) / kRate;
}

TEST(SimulatedNetwork, AMessageTakesLatencyAndTransfer) {
  const auto topology = hosts(2, {kRate, kLatency});
  const auto times = arrivals(topology, std::array{Send{0, 1, 1'000'000}});
  EXPECT_NEAR(times[1], kLatency + transfer(1'000'000), 1e-4);
}

TEST(SimulatedNetwork, ReceiversShareTheirPort) {
  const auto topology = hosts(3, {kRate, kLatency});
  const auto times = arrivals(topology, std::array{Send{0, 2, 500'000}, Send{1, 2, 500'000}});
  EXPECT_NEAR(times[2], kLatency + 2 * transfer(500'000), 1e-3);
}

TEST(SimulatedNetwork, SendersTakeTurnsBetweenReceivers) {
  const auto topology = hosts(3, {kRate, kLatency});
  const auto times = arrivals(topology, std::array{Send{0, 1, 500'000}, Send{0, 2, 500'000}});
  EXPECT_NEAR(times[2], kLatency + 2 * transfer(500'000), 1e-3);
  EXPECT_GT(times[1], kLatency + 1.7 * transfer(500'000));  // not one after the other
}

TEST(SimulatedNetwork, EveryoneToEveryoneFillsAllLinks) {
  constexpr std::size_t kBytes = 200'000;
  const auto topology = hosts(8, {kRate, kLatency});
  std::vector<Send> sends;
  for (int from = 0; from < 8; ++from) {
    for (int to = 0; to < 8; ++to) {
      if (from != to) sends.push_back({from, to, kBytes});
    }
  }
  for (const double time : arrivals(topology, sends)) {
    EXPECT_NEAR(time, kLatency + 7 * transfer(kBytes), 0.15 * transfer(7 * kBytes));
  }
}

TEST(SimulatedNetwork, InsideAHostTheSlowLinkIsNotUsed) {
  Topology topology = hosts(2, {kRate, kLatency}, 2);
  topology.inside = {100 * kRate, kLatency / 100};
  const auto times = arrivals(topology, std::array{Send{0, 1, 1'000'000}, Send{0, 3, 1'000'000}});
  EXPECT_LT(times[1], 0.02 * times[3]);
}

TEST(SimulatedNetwork, ABurstPassesAtOnce) {
  const auto topology = hosts(2, {kRate, kLatency, 1e6});
  EXPECT_DOUBLE_EQ(arrivals(topology, std::array{Send{0, 1, 500'000}})[1], kLatency);
}

TEST(SimulatedNetwork, OneSlowHostHoldsOthersUpOnlyWhereTheyMeetIt) {
  Topology topology = hosts(4, {kRate, kLatency});
  topology.links[3].rate = kRate / 10;
  const auto times = arrivals(topology, std::array{Send{0, 1, 100'000}, Send{2, 3, 100'000}});
  EXPECT_NEAR(times[3] - kLatency, 10 * (times[1] - kLatency), 1e-3);
}

// Three ranks send to the fourth; whoever sends or receives a frame needs a core for a second.
TEST(SimulatedNetwork, RanksShareTheCores) {
  const std::array sends{Send{0, 3, 1}, Send{1, 3, 1}, Send{2, 3, 1}};
  Topology topology = hosts(4, {});
  topology.processors = {.cores = 0, .per_frame = 1, .per_byte = 0};
  EXPECT_EQ(arrivals(topology, sends)[3], 0);  // without cores nothing takes time
  topology.processors.cores = 1;
  EXPECT_NEAR(arrivals(topology, sends)[3], 6, 0.1);
  topology.processors.cores = 2;  // while one of them receives, the other sends
  EXPECT_NEAR(arrivals(topology, sends)[3], 4, 0.1);
}

// All of them compute for a second, wait for two, and compute again: a wait takes no core.
TEST(SimulatedNetwork, WorkTakesACoreAndAWaitDoesNot) {
  const auto ends = [](std::size_t cores) {
    Topology topology = hosts(4, {});
    topology.processors.cores = cores;
    std::vector<double> times(4);
    Network(topology).run([&](Network::Rank& comm) {
      comm.work(1);
      const double end = comm.now() + 2;
      while (!comm.wait_until(end)) comm.poll();
      comm.work(1);
      times[at(comm.rank())] = comm.now();
    });
    std::ranges::sort(times);
    return times;
  };
  const auto expect = [](const std::vector<double>& times, std::array<double, 4> expected) {
    for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(times[i], expected[i], 0.1) << i;
  };
  expect(ends(0), {2, 2, 2, 2});
  expect(ends(4), {4, 4, 4, 4});
  expect(ends(2), {4, 4, 5, 5});  // those that began later wait until 4
  expect(ends(1), {5, 6, 7, 8});  // the first waits for the fourth, until 4
}

TEST(SimulatedNetwork, AnAlarmRingsUnlessSomethingComesBefore) {
  Network(hosts(2, {kRate, kLatency})).run([&](Network::Rank& comm) {
    comm.enter({comm::Place::Kind::step, 0});
    if (comm.rank() == 0) {
      EXPECT_TRUE(comm.wait_until(0.5));
      EXPECT_EQ(comm.now(), 0.5);
      comm.post(1, kTag, {}, {});
      comm.flush();
      return;
    }
    comm.expect(kTag, 0);
    EXPECT_FALSE(comm.wait_until(1));
    EXPECT_NEAR(comm.now(), 0.5 + kLatency, 1e-4);
    comm.wait(kTag, 1);
    EXPECT_TRUE(comm.wait_until(1));
    EXPECT_EQ(comm.now(), 1);
  });
}

TEST(SimulatedNetwork, WhoWaitsForNothingIsToldSo) {
  EXPECT_THROW(Network(hosts(3, {kRate, kLatency})).run([](Network::Rank& comm) {
    comm.enter({comm::Place::Kind::step, 0});
    if (comm.rank() == 0) return;
    comm.expect(kTag, 0);
    comm.wait(kTag, 1);
  }),
               CommError);
}

// Steps on it give the bits that they give on threads, and take the same time in every run.
TEST(SimulatedNetwork, StepsAreThoseOfThreads) {
  constexpr std::size_t kEntries = 3000, kSteps = 6;
  for (const char* method : {"topk", "ok_topk", "arc_topk", "gtopk", "dense"}) {
    const auto train = [&](Communicator& comm) {
      Reducer reducer(Layout({{"a", {40, 50}}, {"b", {20, 50}}}), method);
      std::vector<float> values(kEntries), sums(kEntries);
      for (std::size_t step = 0; step < kSteps; ++step) {
        for (std::size_t i = 0; i < kEntries; ++i) {
          values[i] = static_cast<float>((i * 7919 + step * 104729 + at(comm.rank()) * 31) % 1009);
        }
        reducer.average(comm, values);
        for (std::size_t i = 0; i < kEntries; ++i) sums[i] += values[i];
      }
      return sums;
    };
    std::vector<float> expected;
    run_ranks(5, [&](Communicator& comm) {
      auto sums = train(comm);
      if (comm.rank() == 0) expected = std::move(sums);
    });
    std::array<double, 2> ends{};
    for (double& end : ends) {
      Network(hosts(5, {kRate, kLatency})).run([&](Network::Rank& comm) {
        const auto sums = train(comm);
        EXPECT_EQ(sums, expected) << method << ", rank " << comm.rank();
        if (comm.rank() == 0) end = comm.now();
      });
    }
    EXPECT_GT(ends[0], kSteps * kLatency) << method;
    EXPECT_EQ(ends[0], ends[1]) << method;
  }
}

}  // namespace
}  // namespace topreduce::simulated
