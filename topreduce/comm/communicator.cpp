#include "topreduce/comm/communicator.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace topreduce::comm {
namespace {

// Stops at the largest number instead of wrapping round to a small one.
std::size_t total(std::span<const std::size_t> counts) {
  constexpr auto kMost = std::numeric_limits<std::size_t>::max();
  std::size_t sum = 0;
  for (const std::size_t count : counts) sum = count > kMost - sum ? kMost : sum + count;
  return sum;
}

[[noreturn]] void fail(const char* call, const Communicator& comm, const std::string& what) {
  throw CommError(std::string(call) + " on rank " + std::to_string(comm.rank()) + ": " + what);
}

// A transport may be the user's own: what it delivers is checked before anyone relies on it.
void check_inbox(const char* call, const Communicator& comm, std::size_t own, const Inbox& inbox) {
  const auto ranks = static_cast<std::size_t>(comm.size());
  if (inbox.counts.size() != ranks) {
    fail(call, comm,
         "the transport delivered " + std::to_string(inbox.counts.size()) + " counts for " +
             std::to_string(ranks) + " ranks");
  }
  if (total(inbox.counts) != inbox.bytes.size()) {
    fail(call, comm,
         "the transport delivered " + std::to_string(inbox.bytes.size()) + " bytes, but counts " +
             std::to_string(total(inbox.counts)));
  }
  const std::size_t returned = inbox.counts[static_cast<std::size_t>(comm.rank())];
  if (returned != own) {
    fail(call, comm,
         "the transport returned " + std::to_string(returned) + " of this rank's own " +
             std::to_string(own) + " bytes");
  }
}

void check_part(const char* call, const Communicator& comm, std::size_t from, std::size_t expected,
                const Inbox& inbox) {
  if (inbox.counts[from] == expected) return;
  fail(call, comm,
       "rank " + std::to_string(from) + " sent " + std::to_string(inbox.counts[from]) +
           " bytes where " + std::to_string(expected) +
           " were expected; the length must be the same on every rank");
}

void book(Traffic& traffic, std::size_t sent, std::size_t received) {
  traffic.bytes_sent += sent;
  traffic.bytes_received += received;
  ++traffic.rounds;
}

}  // namespace

std::span<const std::byte> Inbox::from(int rank) const {
  assert(rank >= 0 && static_cast<std::size_t>(rank) < counts.size());
  const auto start = std::accumulate(counts.begin(), counts.begin() + rank, std::size_t{0});
  return std::span(bytes).subspan(start, counts[static_cast<std::size_t>(rank)]);
}

void Communicator::all_to_all(std::span<const std::byte> send, std::span<const std::size_t> counts,
                              Inbox& inbox) {
  if (counts.size() != static_cast<std::size_t>(size())) {
    throw std::invalid_argument("all_to_all: " + std::to_string(counts.size()) + " counts for " +
                                std::to_string(size()) + " ranks");
  }
  if (total(counts) != send.size()) {
    throw std::invalid_argument("all_to_all: counts add up to " + std::to_string(total(counts)) +
                                ", but there are " + std::to_string(send.size()) +
                                " bytes to send");
  }
  const std::size_t own = counts[static_cast<std::size_t>(rank())];
  do_all_to_all(send, counts, inbox);
  check_inbox("all_to_all", *this, own, inbox);
  if (size() > 1) book(traffic_, send.size() - own, inbox.bytes.size() - own);
}

void Communicator::all_gather(std::span<const std::byte> mine, Inbox& inbox) {
  do_all_gather(mine, inbox);
  check_inbox("all_gather", *this, mine.size(), inbox);
  if (size() > 1) {
    book(traffic_, mine.size() * static_cast<std::size_t>(size() - 1),
         inbox.bytes.size() - mine.size());
  }
}

void Communicator::broadcast(std::span<std::byte> bytes, int root) {
  if (root < 0 || root >= size()) {
    throw std::invalid_argument("broadcast: root " + std::to_string(root) +
                                " is not a rank from 0 to " + std::to_string(size() - 1));
  }
  if (size() == 1) return;
  do_broadcast(bytes, root);
  if (rank() == root) {
    book(traffic_, bytes.size() * static_cast<std::size_t>(size() - 1), 0);
  } else {
    book(traffic_, 0, bytes.size());
  }
}

// Every rank adds up one part of the values and hands the sum round.
//
//   rank 0: a0 a1 a2      a0 b0 c0      s0      s0 s1 s2
//   rank 1: b0 b1 b2  ->  a1 b1 c1  ->  s1  ->  s0 s1 s2
//   rank 2: c0 c1 c2      a2 b2 c2      s2      s0 s1 s2
//
// Two rounds; each rank sends 2 (P - 1) / P of its values, like a ring.
void Communicator::all_reduce(std::span<float> values) {
  if (size() == 1) return;
  const auto ranks = static_cast<std::size_t>(size());
  const auto start = [&](std::size_t part) { return values.size() * part / ranks; };
  counts_.resize(ranks);
  for (std::size_t r = 0; r < ranks; ++r) counts_[r] = (start(r + 1) - start(r)) * sizeof(float);

  const auto me = static_cast<std::size_t>(rank());
  const auto mine = values.subspan(start(me), start(me + 1) - start(me));
  all_to_all(std::as_bytes(values), counts_, scratch_);
  for (std::size_t r = 0; r < ranks; ++r) {
    check_part("all_reduce", *this, r, counts_[me], scratch_);
  }
  std::ranges::copy(scratch_.from(0), std::as_writable_bytes(mine).begin());
  for (std::size_t r = 1; r < ranks; ++r) {
    const std::byte* part = scratch_.bytes.data() + r * counts_[me];
    for (std::size_t i = 0; i < mine.size(); ++i) {
      float value;
      std::memcpy(&value, part + i * sizeof(float), sizeof(float));
      mine[i] += value;
    }
  }

  all_gather(std::as_bytes(mine), scratch_);
  for (std::size_t r = 0; r < ranks; ++r) {
    check_part("all_reduce", *this, r, counts_[r], scratch_);
  }
  std::ranges::copy(scratch_.bytes, std::as_writable_bytes(values).begin());
}

void Communicator::barrier() {
  if (size() == 1) return;
  do_barrier();
  book(traffic_, 0, 0);
}

void Communicator::do_broadcast(std::span<std::byte> bytes, int root) {
  const std::span<const std::byte> mine = rank() == root ? bytes : std::span<std::byte>();
  do_all_gather(mine, scratch_);
  check_inbox("broadcast", *this, mine.size(), scratch_);
  check_part("broadcast", *this, static_cast<std::size_t>(root), bytes.size(), scratch_);
  if (rank() != root) std::ranges::copy(scratch_.from(root), bytes.begin());
}

void Communicator::do_barrier() {
  do_all_gather({}, scratch_);
  check_inbox("barrier", *this, 0, scratch_);
}

}  // namespace topreduce::comm
