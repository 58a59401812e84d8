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
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "sanitized.h"
#include "tiers.h"
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
  // There many short frames take long.
  const std::size_t large = std::size_t{1} << (kSanitized ? 16 : 20);
  Inbox inbox;
  exchange_parts(comm, inbox, [large](int, int) { return large; });
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

/// The counters at a moment when nothing is under way between any ranks. Until the next such
/// moment rank 0 sends and receives a message of kQuiet bytes for each other rank, they one each.
constexpr std::size_t kQuiet = 3;
inline Traffic quiet_traffic(Communicator& comm) {
  constexpr Tag kDone{1, 0}, kGo{2, 0};
  if (comm.rank() != 0) {
    const Traffic traffic = comm.traffic();
    comm.expect(kGo, 0);
    comm.post(0, kDone, {}, {});
    comm.wait(kGo, 1);
    comm.release(kGo);
    return traffic;
  }
  for (int r = 1; r < comm.size(); ++r) comm.expect(kDone, r);
  comm.wait(kDone, at(comm.size() - 1));
  comm.release(kDone);
  const Traffic traffic = comm.traffic();
  for (int r = 1; r < comm.size(); ++r) comm.post(r, kGo, {}, {});
  comm.flush();
  return traffic;
}

/// Runs `call`, whose messages are short, and compares what the counters say of it.
template <class Call>
void expect_traffic(Communicator& comm, const char* name, std::size_t sent, std::size_t received,
                    std::size_t rounds, Call call) {
  const Traffic before = quiet_traffic(comm);
  call();
  const Traffic after = quiet_traffic(comm);
  const std::size_t others = at(comm.size() - 1);
  const std::size_t quiet = comm.rank() == 0 ? others : std::min<std::size_t>(others, 1);
  EXPECT_EQ(after.bytes_sent - before.bytes_sent, sent + quiet * kQuiet) << name;
  EXPECT_EQ(after.bytes_received - before.bytes_received, received + quiet * kQuiet) << name;
  EXPECT_EQ(after.messages - before.messages, rounds * others + quiet) << name;
  EXPECT_EQ(after.rounds - before.rounds, rounds) << name;
}

/// What a collective sends for so many bytes: exchange, round, length, call and checksum.
constexpr std::size_t framed(std::size_t bytes) {
  return 5 + 1 + (bytes + 5 < 128 ? 1 : 2) + 5 + bytes;
}

inline void traffic_is_exact(Communicator& comm) {
  comm.enter({Place::Kind::configure, 1});  // rounds start again
  comm.barrier();                           // everyone has heard of the place
  const auto ranks = static_cast<std::size_t>(comm.size());
  const auto me = static_cast<std::size_t>(comm.rank());
  const std::size_t others = ranks - 1;
  const std::size_t one = ranks > 1 ? 1 : 0;  // rounds: alone there is nobody to wait for
  Inbox inbox;

  // Rank r sends 10 (r + 1) + to bytes to each.
  std::vector<std::size_t> counts;
  std::size_t total = 0, sent = 0, received = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    counts.push_back(10 * (me + 1) + r);
    total += counts.back();
    if (r != me) sent += framed(counts.back());
    if (r != me) received += framed(10 * (r + 1) + me);
  }
  const std::vector<std::byte> send(total);
  expect_traffic(comm, "all_to_all", sent, received, one,
                 [&] { comm.all_to_all(send, counts, inbox); });

  const std::vector<std::byte> mine(me);
  received = 0;
  for (std::size_t r = 0; r < ranks; ++r) received += r == me ? 0 : framed(r);
  expect_traffic(comm, "all_gather", framed(me) * others, received, one,
                 [&] { comm.all_gather(mine, inbox); });

  std::vector<std::byte> bytes(100);
  const bool root = comm.rank() == comm.size() - 1;
  expect_traffic(comm, "broadcast", framed(root ? 100 : 0) * others,
                 framed(0) * others + (root ? 0 : 100), one,
                 [&] { comm.broadcast(bytes, comm.size() - 1); });

  expect_traffic(comm, "barrier", framed(0) * others, framed(0) * others, one,
                 [&] { comm.barrier(); });

  // 200 values do not always divide evenly: this rank adds up its part of them.
  const auto part = [&](std::size_t r) {
    return framed((200 * (r + 1) / ranks - 200 * r / ranks) * sizeof(float));
  };
  std::size_t volume = others * part(me);
  for (std::size_t r = 0; r < ranks; ++r) volume += r == me ? 0 : part(r);
  std::vector<float> values(200);
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
  const int rounds = kLong ? 1000 : kSanitized ? 100 : 300;
  Inbox inbox;
  std::vector<float> values(3);
  for (int round = 0; round < rounds; ++round) {
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

// ---- messages ----------------------------------------------------------------------------------

/// Of message `tag` from rank to rank; none, one byte, or some thousands.
inline std::vector<std::byte> message_of(int from, int to, const Tag& tag) {
  const std::size_t length = (at(from) * 7 + at(to) * 3 + tag.exchange * 5 + tag.round) % 5;
  return pattern(from + static_cast<int>(tag.round), to + static_cast<int>(tag.exchange),
                 length < 2 ? length : length * 700);
}

inline void post_to(Communicator& comm, int peer, const Tag& tag) {
  const auto bytes = message_of(comm.rank(), peer, tag);
  const std::size_t head = bytes.size() / 3;
  comm.post(peer, tag, std::span(bytes).first(head), std::span(bytes).subspan(head));
}

inline void expect_from(Communicator& comm, int peer, const Tag& tag) {
  EXPECT_TRUE(same(comm.message(tag, peer), message_of(peer, comm.rank(), tag)))
      << "rank " << comm.rank() << " from " << peer << ": " << tag.exchange << ", " << tag.round;
}

/// Calls body(peer) for all other ranks.
template <class Body>
void for_others(const Communicator& comm, Body&& body) {
  for (int peer = 0; peer < comm.size(); ++peer) {
    if (peer != comm.rank()) body(peer);
  }
}

inline void messages_come_in_any_order(Communicator& comm) {
  std::mt19937 rng(static_cast<unsigned>(comm.rank() + 1));
  std::vector<Tag> tags;
  for (std::uint32_t exchange = 0; exchange < 3; ++exchange) {
    for (std::uint32_t round = 0; round < 4; ++round) tags.push_back({exchange * 1000, round * 77});
  }
  const std::uint64_t times = kSanitized && !kLong ? 5 : 20;
  for (std::uint64_t time = 0; time < times; ++time) {
    comm.enter({Place::Kind::step, time});
    std::vector<std::pair<int, Tag>> outgoing;
    for_others(comm, [&](int peer) {
      for (const Tag& tag : tags) outgoing.emplace_back(peer, tag);
    });
    std::ranges::shuffle(outgoing, rng);
    std::ranges::shuffle(tags, rng);
    for (const auto& [peer, tag] : outgoing) {
      post_to(comm, peer, tag);
      if (rng() % 4 == 0) comm.flush();
      if (rng() % 8 == 0) comm.poll();
    }
    for (const Tag& tag : tags) {
      for_others(comm, [&](int peer) { comm.expect(tag, peer); });
      comm.wait(tag, at(comm.size() - 1));
      for_others(comm, [&](int peer) { expect_from(comm, peer, tag); });
      comm.release(tag);
      EXPECT_EQ(comm.arrived(tag), 0u);
    }
  }
}

// Along a chain: rank r hears from r - 1 only, and passes on.
inline void messages_may_go_to_some_only(Communicator& comm) {
  comm.enter({Place::Kind::step, 1});
  const Tag tag{3, 0};
  if (comm.rank() > 0) {
    comm.expect(tag, comm.rank() - 1);
    comm.wait(tag, 1);
    expect_from(comm, comm.rank() - 1, tag);
  }
  if (comm.rank() + 1 < comm.size()) post_to(comm, comm.rank() + 1, tag);
  comm.barrier();
}

inline void messages_may_come_early(Communicator& comm) {
  for (int late = 0; late < comm.size(); ++late) {
    if (comm.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const Tag tag{1, static_cast<std::uint32_t>(late)};
    for (std::uint64_t step = 0; step < 3; ++step) {
      comm.enter({Place::Kind::step, step});
      for_others(comm, [&](int peer) {
        comm.expect(tag, peer);
        post_to(comm, peer, tag);
      });
      comm.wait(tag, at(comm.size() - 1));
      for_others(comm, [&](int peer) { expect_from(comm, peer, tag); });
    }
  }
}

// Messages that nobody took, some of them in parts, do not come to light at the next place.
inline void messages_of_a_place_that_was_left_are_dropped(Communicator& comm) {
  const Tag tag{4, 4};
  const auto bytes = pattern(99, comm.rank(), 5000);
  for (std::uint64_t step = 0; step < 10; ++step) {
    comm.enter({Place::Kind::step, 2 * step});
    for_others(comm, [&](int peer) { comm.post(peer, tag, {}, bytes); });
    comm.flush();
    if (comm.rank() % 2 == 0) comm.poll();
    comm.enter({Place::Kind::step, 2 * step + 1});
    for_others(comm, [&](int peer) {
      comm.expect(tag, peer);
      post_to(comm, peer, tag);
    });
    comm.wait(tag, at(comm.size() - 1));
    for_others(comm, [&](int peer) { expect_from(comm, peer, tag); });
    comm.release(tag);
  }
  comm.barrier();
}

// Some ranks enter a place and take it back, which nobody else notices.
inline void a_place_can_be_taken_back(Communicator& comm) {
  Inbox inbox;
  const Tag tag{5, 0};
  for (int time = 0; time < 50; ++time) {
    if (time % 10 == 0) comm.enter({Place::Kind::bypass, static_cast<std::uint64_t>(time)});
    comm.barrier();
    if ((comm.rank() + time) % 3 == 0) {
      comm.enter({Place::Kind::step, 1});
      for_others(comm, [&](int peer) {
        comm.expect(tag, peer);
        comm.post(peer, tag, {}, pattern(1, 1, 100));
      });
      comm.poll();
      comm.leave();
      comm.leave();  // there is no more than one to take back
    }
    const std::vector<int> mine = {time, comm.rank()};
    comm.all_gather(std::as_bytes(std::span(mine)), inbox);
    for (int r = 0; r < comm.size(); ++r) {
      EXPECT_TRUE(same(inbox.from(r), std::vector<int>{time, r}));
    }
    EXPECT_EQ(comm.arrived(tag), 0u);
  }
}

// All of them, whoever is elsewhere and whatever it does, and they may go on.
inline void ranks_at_different_places_are_all_told(Communicator& comm) {
  if (comm.size() == 1) return;
  std::uint64_t step = 100;
  for (int other = 0; other < comm.size(); ++other) {
    for (int time = 0; time < 5; ++time, step += 10) {
      const bool elsewhere = comm.rank() == other;
      comm.enter({elsewhere ? Place::Kind::configure : Place::Kind::step, step});
      std::string text;
      try {
        comm.barrier();
      } catch (const std::invalid_argument& error) {
        text = error.what();
      }
      for (int r = 0; r < comm.size(); ++r) {
        const std::string where = (r == other ? "configure() before step " : "step ");
        const std::string words = "rank " + std::to_string(r) + ": " + where + std::to_string(step);
        EXPECT_NE(text.find(words), std::string::npos) << text << " lacks " << words;
      }
      if (time % 2 == 0) continue;  // straight into the next one
      comm.enter({Place::Kind::step, step});
      parts_may_be_uneven_and_empty(comm);
    }
  }
  comm.enter({Place::Kind::step, 0});
  many_rounds_stay_in_step(comm);
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
    {"messages_come_in_any_order", messages_come_in_any_order},
    {"messages_may_go_to_some_only", messages_may_go_to_some_only},
    {"messages_may_come_early", messages_may_come_early},
    {"messages_of_a_place_that_was_left_are_dropped",
     messages_of_a_place_that_was_left_are_dropped},
    {"a_place_can_be_taken_back", a_place_can_be_taken_back},
    {"ranks_at_different_places_are_all_told", ranks_at_different_places_are_all_told},
};

}  // namespace topreduce::comm::suite
