#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "topreduce/comm/communicator.h"

// What every transport must do. Each check is collective: every rank calls it with its own
// communicator, in the order of kChecks. Ranks that compare clocks share a machine.

namespace topreduce::comm::suite {

/// Bytes that differ by sender, receiver and place; after 251 they start again.
inline std::vector<std::byte> pattern(int from, int to, std::size_t length) {
  constexpr std::size_t kPeriod = 251;
  std::vector<std::byte> bytes(length);
  for (std::size_t i = 0; i < std::min(length, kPeriod); ++i) {
    bytes[i] = static_cast<std::byte>(static_cast<std::size_t>(from * 101 + to * 13 + 1) + i * 7);
  }
  for (std::size_t i = kPeriod; i < length; i += kPeriod) {
    std::copy_n(bytes.data(), std::min(kPeriod, length - i), bytes.data() + i);
  }
  return bytes;
}

template <class T>
bool same(std::span<const std::byte> bytes, const std::vector<T>& expected) {
  const auto other = std::as_bytes(std::span(expected));
  return bytes.size() == other.size() &&
         (bytes.empty() || std::memcmp(bytes.data(), other.data(), bytes.size()) == 0);
}

/// Sends length(from, to) bytes from each rank to each other and compares what arrives.
template <class Length>
void exchange_parts(Communicator& comm, Inbox& inbox, Length length) {
  std::vector<std::byte> send;
  std::vector<std::size_t> counts;
  for (int to = 0; to < comm.size(); ++to) {
    const auto part = pattern(comm.rank(), to, length(comm.rank(), to));
    send.insert(send.end(), part.begin(), part.end());
    counts.push_back(part.size());
  }
  comm.all_to_all(send, counts, inbox);
  EXPECT_EQ(inbox.counts.size(), static_cast<std::size_t>(comm.size()));
  for (int from = 0; from < comm.size(); ++from) {
    EXPECT_TRUE(same(inbox.from(from), pattern(from, comm.rank(), length(from, comm.rank()))))
        << "rank " << comm.rank() << " from " << from;
  }
}

inline void ranks_are_numbered(Communicator& comm) {
  Inbox inbox;
  const std::vector<int> mine = {comm.rank()};
  comm.all_gather(std::as_bytes(std::span(mine)), inbox);
  for (int r = 0; r < comm.size(); ++r) {
    EXPECT_TRUE(same(inbox.from(r), std::vector<int>{r}));
  }
}

inline void parts_may_be_uneven_and_empty(Communicator& comm) {
  Inbox inbox;
  exchange_parts(comm, inbox, [](int from, int to) {
    return static_cast<std::size_t>((from * 5 + to * 3) % 4 * 11);
  });
}

inline void parts_may_all_be_empty(Communicator& comm) {
  Inbox inbox;
  exchange_parts(comm, inbox, [](int, int) { return std::size_t{0}; });
  EXPECT_TRUE(inbox.bytes.empty());
  comm.all_gather({}, inbox);
  EXPECT_TRUE(inbox.bytes.empty());
}

inline void one_rank_may_send_to_one(Communicator& comm) {
  Inbox inbox;
  const int last = comm.size() - 1;
  exchange_parts(comm, inbox, [last](int from, int to) {
    return std::size_t{from == last && to == 0 ? 1000u : 0u};
  });
}

inline void parts_may_be_large(Communicator& comm) {
  Inbox inbox;
  exchange_parts(comm, inbox, [](int, int) { return std::size_t{1} << 20; });
}

inline void all_gather_takes_different_lengths(Communicator& comm) {
  Inbox inbox;
  const auto length = [](int rank) { return static_cast<std::size_t>(rank * 1234); };
  comm.all_gather(pattern(comm.rank(), 0, length(comm.rank())), inbox);
  for (int r = 0; r < comm.size(); ++r) {
    EXPECT_TRUE(same(inbox.from(r), pattern(r, 0, length(r)))) << "from " << r;
  }
}

inline void broadcast_takes_any_root_and_length(Communicator& comm) {
  for (int root = 0; root < comm.size(); ++root) {
    for (const std::size_t length : {0u, 1u, 1000u}) {
      auto bytes = pattern(comm.rank(), 0, length);
      comm.broadcast(bytes, root);
      EXPECT_TRUE(same(bytes, pattern(root, 0, length))) << "root " << root;
    }
  }
}

/// Values of so different a size that another order of summation gives other bits.
inline std::vector<float> values_of(int rank, std::size_t length) {
  std::mt19937 rng(static_cast<unsigned>(rank + 1));
  std::vector<float> values(length);
  for (float& value : values) {
    const auto bits = static_cast<std::int32_t>(rng());
    value = std::ldexp(static_cast<float>(bits), bits & 15);
  }
  return values;
}

inline void all_reduce_adds_in_rank_order(Communicator& comm) {
  for (const std::size_t length : {0u, 1u, 2u, 7u, 1000u}) {
    auto expected = values_of(0, length);
    for (int r = 1; r < comm.size(); ++r) {
      const auto part = values_of(r, length);
      for (std::size_t i = 0; i < length; ++i) expected[i] += part[i];
    }
    auto values = values_of(comm.rank(), length);
    comm.all_reduce(values);
    EXPECT_TRUE(same(std::as_bytes(std::span(values)), expected)) << length << " values";

    Inbox inbox;
    comm.all_gather(std::as_bytes(std::span(values)), inbox);
    for (int r = 0; r < comm.size(); ++r) EXPECT_TRUE(same(inbox.from(r), values));
  }
}

inline void barrier_waits_for_the_last(Communicator& comm) {
  using Clock = std::chrono::steady_clock;
  const auto now = [] { return Clock::now().time_since_epoch().count(); };
  for (int late = 0; late < comm.size(); ++late) {
    if (comm.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const std::vector<Clock::rep> entered = {now()};
    comm.barrier();
    const Clock::rep left = now();
    Inbox inbox;
    comm.all_gather(std::as_bytes(std::span(entered)), inbox);
    for (int r = 0; r < comm.size(); ++r) {
      Clock::rep other;
      std::memcpy(&other, inbox.from(r).data(), sizeof(other));
      EXPECT_GE(left, other) << "rank " << r << " was late";
    }
  }
}

/// Runs `call` and compares what the counters say of it.
template <class Call>
void expect_traffic(Communicator& comm, const char* name, std::size_t sent, std::size_t received,
                    std::size_t rounds, Call call) {
  const Traffic before = comm.traffic();
  call();
  EXPECT_EQ(comm.traffic().bytes_sent - before.bytes_sent, sent) << name;
  EXPECT_EQ(comm.traffic().bytes_received - before.bytes_received, received) << name;
  EXPECT_EQ(comm.traffic().rounds - before.rounds, rounds) << name;
}

inline void traffic_is_exact(Communicator& comm) {
  const auto ranks = static_cast<std::size_t>(comm.size());
  const auto me = static_cast<std::size_t>(comm.rank());
  const std::size_t others = ranks - 1;
  const std::size_t one = ranks > 1 ? 1 : 0;  // rounds: alone there is nobody to wait for
  Inbox inbox;

  // Rank r sends 10 (r + 1) + to bytes to each.
  std::vector<std::size_t> counts;
  std::size_t sent = 0, received = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    counts.push_back(10 * (me + 1) + r);
    if (r != me) sent += counts.back();
    if (r != me) received += 10 * (r + 1) + me;
  }
  const std::vector<std::byte> send(sent + counts[me]);
  expect_traffic(comm, "all_to_all", sent, received, one,
                 [&] { comm.all_to_all(send, counts, inbox); });

  const std::vector<std::byte> mine(me);
  expect_traffic(comm, "all_gather", me * others, ranks * others / 2 - me, one,
                 [&] { comm.all_gather(mine, inbox); });

  std::vector<std::byte> bytes(100);
  const bool root = comm.rank() == comm.size() - 1;
  expect_traffic(comm, "broadcast", root ? 100 * others : 0, root ? 0 : 100, one,
                 [&] { comm.broadcast(bytes, comm.size() - 1); });

  expect_traffic(comm, "barrier", 0, 0, one, [&] { comm.barrier(); });

  // 1000 values do not always divide evenly: this rank adds up `part` of them.
  const std::size_t part = ranks == 1 ? 0 : 1000 * (me + 1) / ranks - 1000 * me / ranks;
  const std::size_t rest = ranks == 1 ? 0 : 1000 - part;
  const std::size_t volume = sizeof(float) * (rest + part * others);
  std::vector<float> values(1000);
  expect_traffic(comm, "all_reduce", volume, volume, 2 * one, [&] { comm.all_reduce(values); });
}

/// The message must name every one of `words`.
template <class Call>
void expect_invalid(Call call, std::initializer_list<const char*> words) {
  try {
    call();
    ADD_FAILURE() << "no error";
  } catch (const std::invalid_argument& error) {
    for (const char* word : words) {
      EXPECT_NE(std::strstr(error.what(), word), nullptr) << error.what();
    }
  }
}

inline void wrong_arguments_are_refused(Communicator& comm) {
  const Traffic before = comm.traffic();
  const auto ranks = static_cast<std::size_t>(comm.size());
  std::vector<std::byte> bytes(ranks);
  Inbox inbox;
  const std::vector<std::size_t> too_many(ranks + 1, 0), too_long(ranks, 2);
  expect_invalid([&] { comm.all_to_all({}, too_many, inbox); },
                 {"all_to_all", std::to_string(ranks + 1).c_str(), std::to_string(ranks).c_str()});
  expect_invalid([&] { comm.all_to_all(bytes, too_long, inbox); },
                 {"all_to_all", std::to_string(2 * ranks).c_str(), std::to_string(ranks).c_str()});
  if (ranks > 1) {
    std::vector<std::size_t> wraps(ranks, 0);  // round to the right sum
    wraps.front() = ~std::size_t{0};
    wraps.back() = ranks + 1;
    expect_invalid([&] { comm.all_to_all(bytes, wraps, inbox); }, {"all_to_all"});
  }
  expect_invalid([&] { comm.broadcast(bytes, -1); }, {"broadcast", "-1"});
  expect_invalid([&] { comm.broadcast(bytes, comm.size()); },
                 {"broadcast", std::to_string(ranks).c_str()});
  EXPECT_EQ(comm.traffic().rounds, before.rounds);
  comm.barrier();  // nothing was sent: the next call finds all ranks in step
}

inline void many_rounds_stay_in_step(Communicator& comm) {
  Inbox inbox;
  std::vector<float> values(3);
  for (int round = 0; round < 1000; ++round) {
    const std::vector<int> mine = {round, comm.rank()};
    comm.all_gather(std::as_bytes(std::span(mine)), inbox);
    for (int r = 0; r < comm.size(); ++r) {
      EXPECT_TRUE(same(inbox.from(r), std::vector<int>{round, r}));
    }
    if (round % 10 != 0) continue;
    exchange_parts(comm, inbox, [round](int from, int to) {
      return static_cast<std::size_t>((from + to + round) % 9);
    });
    values.assign(3, static_cast<float>(round));
    comm.all_reduce(values);
    EXPECT_EQ(values, std::vector<float>(3, static_cast<float>(round * comm.size())));
  }
}

inline void an_inbox_is_reused(Communicator& comm) {
  Inbox inbox;
  const auto most = [](int from, int to) { return static_cast<std::size_t>(500 + from + to); };
  exchange_parts(comm, inbox, most);
  const std::byte* const bytes = inbox.bytes.data();
  const std::size_t* const counts = inbox.counts.data();
  for (std::size_t round = 0; round < 20; ++round) {
    exchange_parts(comm, inbox, [&](int from, int to) { return most(from, to) - round; });
    comm.all_gather(pattern(comm.rank(), 0, 500 - round), inbox);
    EXPECT_EQ(inbox.bytes.data(), bytes);
    EXPECT_EQ(inbox.counts.data(), counts);
  }
}

struct Check {
  const char* name;
  void (*run)(Communicator&);
};

inline constexpr Check kChecks[] = {
    {"ranks_are_numbered", ranks_are_numbered},
    {"parts_may_be_uneven_and_empty", parts_may_be_uneven_and_empty},
    {"parts_may_all_be_empty", parts_may_all_be_empty},
    {"one_rank_may_send_to_one", one_rank_may_send_to_one},
    {"parts_may_be_large", parts_may_be_large},
    {"all_gather_takes_different_lengths", all_gather_takes_different_lengths},
    {"broadcast_takes_any_root_and_length", broadcast_takes_any_root_and_length},
    {"all_reduce_adds_in_rank_order", all_reduce_adds_in_rank_order},
    {"barrier_waits_for_the_last", barrier_waits_for_the_last},
    {"traffic_is_exact", traffic_is_exact},
    {"wrong_arguments_are_refused", wrong_arguments_are_refused},
    {"many_rounds_stay_in_step", many_rounds_stay_in_step},
    {"an_inbox_is_reused", an_inbox_is_reused},
};

}  // namespace topreduce::comm::suite
