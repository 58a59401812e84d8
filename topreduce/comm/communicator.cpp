#include "topreduce/comm/communicator.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "topreduce/fingerprint.h"
#include "topreduce/wire/checksum.h"
#include "topreduce/wire/little_endian.h"

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

void check_part(const char* call, const Communicator& comm, std::size_t from, std::size_t expected,
                std::size_t came) {
  if (came == expected) return;
  fail(call, comm,
       "rank " + std::to_string(from) + " sent " + std::to_string(came) + " bytes where " +
           std::to_string(expected) + " were expected; the length must be the same on every rank");
}

}  // namespace

std::span<const std::byte> Inbox::from(int rank) const {
  assert(rank >= 0 && at(rank) < counts.size());
  const auto start = std::accumulate(counts.begin(), counts.begin() + rank, std::size_t{0});
  return std::span(bytes).subspan(start, counts[at(rank)]);
}

Communicator::Communicator(int rank, int size, std::shared_ptr<Mailbox> mailbox)
    : rank_(rank), size_(size), mailbox_(std::move(mailbox)) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw std::invalid_argument("communicator: rank " + std::to_string(rank) + " of " +
                                std::to_string(size) + " does not exist");
  }
  if (!mailbox_) mailbox_ = std::make_shared<Mailbox>(size);
  outgoing_.resize(at(size));
}

// ---- messages ----------------------------------------------------------------------------------

void Communicator::enter(const Place& place) {
  for (Outgoing& peer : outgoing_) peer.stream.clear();  // of a part that was broken off
  mailbox_->enter(place);
  collectives_before_ = std::exchange(collectives_, 0);
  native_here_ = 0;
  sent_ = false;
  ended_by_all_ = false;
}

void Communicator::leave() noexcept {
  for (Outgoing& peer : outgoing_) peer.stream.clear();
  if (sent_ || mailbox_->epoch() == 0) return;
  mailbox_->leave();
  collectives_ = collectives_before_;
  sent_ = true;  // there is no earlier one to take back
  ended_by_all_ = true;
}

void Communicator::stay() {
  if (!sent_) mailbox_->stay();
  sent_ = true;
}

// The first frame of an epoch says all that a receiver must know; the others say that it has.
std::size_t Communicator::head_bytes(const Outgoing& to) const {
  return to.epoch == mailbox_->epoch() ? 1 : Mailbox::kFrameHead;
}

void Communicator::post(int peer, const Tag& tag, std::span<const std::byte> head,
                        std::span<const std::byte> bytes) {
  assert(peer != rank_ && peer >= 0 && peer < size_);
  Bytes& stream = outgoing_[at(peer)].stream;
  make_room(stream, stream.size() + Mailbox::kFrameHead + 32 + head.size() + bytes.size());
  if (stream.empty()) stream.resize(head_bytes(outgoing_[at(peer)]));
  const std::size_t before = stream.size();
  append_varint(stream, tag.exchange);
  append_varint(stream, tag.round);
  append_varint(stream, head.size() + bytes.size());
  append(stream, head);
  append(stream, bytes);
  traffic_.bytes_sent += stream.size() - before;
  ++traffic_.messages;
}

void Communicator::flush() {
  for (int turn = 1; turn < size_; ++turn) {  // not everyone to the same rank at once
    const int peer = (rank_ + turn) % size_;
    Outgoing& to = outgoing_[at(peer)];
    if (to.stream.empty()) continue;
    std::size_t head = head_bytes(to);
    to.longest = std::max(to.longest, to.stream.size());
    stay();
    to.epoch = mailbox_->epoch();
    for (std::span<std::byte> rest = to.stream; rest.size() > head;) {
      const auto frame = rest.first(std::min(rest.size(), frame_limit()));
      if (head == 1) {
        frame[0] = Mailbox::kShortHead;
      } else {
        write_frame_head(mailbox_->epoch(), mailbox_->place(), Places::same, frame.data());
      }
      if (head > 1) traffic_.bytes_sent += head;
      if (frame.size() == to.stream.size()) {
        hand_over(peer, to.stream);
        break;
      }
      send_frame(peer, frame);
      head = 1;
      rest = rest.subspan(frame.size() - head);  // the next head overwrites its end
    }
    to.stream.clear();
  }
}

void Communicator::poll() {
  for (std::uint64_t known = version();; known = version()) {
    if (!receive_frames() || version() == known) break;
  }
  if (mailbox_->differs()) compare_places();
  mailbox_->check(rank_);
}

void Communicator::check_peers() {
  if (mailbox_->differs()) compare_places();
  mailbox_->check(rank_);
  mailbox_->check_left(rank_);
}

void Backoff::pause() const {
  // The longer it has taken, the less a little more matters, and the core has other work.
  constexpr std::chrono::microseconds kLeast(20), kMost(250);
  const auto nap = std::chrono::duration_cast<std::chrono::microseconds>(waited() / 32);
  if (waited() >= spin_) std::this_thread::sleep_for(std::clamp(nap, kLeast, kMost));
}

void Communicator::wait_for_any(std::uint64_t known) {
  flush();
  if (mailbox_->version() != known) return;
  mailbox_->check(rank_);  // what is expected since may be expected of one that is lost
  if (!receive_frames()) return mailbox_->wait(known);
  for (const Backoff backoff(spin()); mailbox_->version() == known; mailbox_->lose_silent()) {
    pause(backoff);
    still_waiting(backoff.waited());
    receive_frames();
  }
}

// Some peer is somewhere else. All ranks tell all others where they are, so that all of them know,
// and drop what they were about; after that they are in step again.
void Communicator::compare_places() {
  std::array<std::byte, Mailbox::kFrameHead> frame;
  write_frame_head(mailbox_->epoch(), mailbox_->place(), Places::differ, frame.data());
  mailbox_->expect_all();
  for (int peer = 0; peer < size_; ++peer) {
    outgoing_[at(peer)].stream.clear();
    if (peer == rank_) continue;
    traffic_.bytes_sent += frame.size();
    send_frame(peer, frame);
  }
  stay();
  for (;;) {
    const std::uint64_t known = mailbox_->version();
    receive_frames();
    if (mailbox_->heard_all(rank_)) break;
    mailbox_->check(rank_);
    wait_for_any(known);
  }
  ended_by_all_ = true;
  misplaced(mailbox_->title(rank_) +
            ": the ranks are at different places of the program: " + mailbox_->places(rank_) +
            ". Make the same calls on all ranks, in the same order; load states of the same step "
            "on all");
}

void Communicator::misplaced(const std::string& text) const {
  throw std::invalid_argument(text);
}

void Communicator::set_timeout(std::chrono::milliseconds timeout) {
  if (timeout <= std::chrono::milliseconds(0)) {
    throw std::invalid_argument("set_timeout: a time-out must be positive, not " +
                                std::to_string(timeout.count()) + " ms");
  }
  // Not so long that a clock would run over.
  mailbox_->set_timeout(std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(1 << 16)));
}

void Communicator::trim() {
  for (Outgoing& peer : outgoing_) {
    const std::size_t used = std::exchange(peer.longest, 0);
    if (peer.stream.empty() && is_far_larger(peer.stream, used)) Bytes().swap(peer.stream);
  }
  if (is_far_larger(scratch_.bytes, scratch_.bytes.size())) Bytes().swap(scratch_.bytes);
  mailbox_->trim();
}

Traffic Communicator::traffic() const {
  Traffic traffic = traffic_;
  traffic.bytes_received += mailbox_->bytes_received();
  return traffic;
}

// ---- collectives -------------------------------------------------------------------------------

Tag Communicator::next_collective() {
  return {kCollective, collectives_++};
}

// Every message starts with the call that it belongs to, and a checksum that also covers the place.
std::array<std::byte, Communicator::kCollectiveHead> Communicator::head_of(
    Call call, const Tag& tag, std::span<const std::byte> part) const {
  std::array<std::byte, kCollectiveHead> head{static_cast<std::byte>(call)};
  const Place& place = mailbox_->place();
  const std::uint64_t seed = Fingerprint()
                                 .add(tag.round)
                                 .add(static_cast<std::uint64_t>(call))
                                 .add(static_cast<std::uint64_t>(place.kind))
                                 .add(place.step)
                                 .long_value();
  wire::store(head.data() + 1, static_cast<std::uint32_t>(wire::xxh64(part, seed)));
  return head;
}

// Sends part_for(r) to every rank r; all bytes that came, in rank order, into `inbox`.
template <class PartFor>
void Communicator::exchange_parts(Call call, PartFor&& part_for, Inbox& inbox) {
  static constexpr std::array<const char*, 5> kNames = {"", "all_to_all", "all_gather", "broadcast",
                                                        "barrier"};
  if (size_ > 1) ++traffic_.rounds;
  const Tag tag = next_collective();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    expect(tag, peer);
    const auto part = part_for(peer);
    post(peer, tag, head_of(call, tag, part), part);
  }
  wait(tag, at(size_ - 1));
  drain();
  inbox.counts.clear();
  std::size_t bytes = 0;
  const auto own = part_for(rank_);
  for (int r = 0; r < size_; ++r) {
    std::size_t count = own.size();
    if (r != rank_) {
      const auto part = message(tag, r);
      const auto other = part.empty() ? std::size_t{0} : static_cast<std::size_t>(part[0]);
      const auto title = [&] {
        return mailbox_->title(rank_) + ", " + to_string(mailbox_->place(), tag);
      };
      if (part.size() < kCollectiveHead || other == 0 || other >= kNames.size() ||
          !std::ranges::equal(
              part.first(kCollectiveHead),
              head_of(static_cast<Call>(other), tag, part.subspan(kCollectiveHead)))) {
        throw WireError(title() + ", message from rank " + std::to_string(r) +
                        ": wrong checksum; the message was damaged on its way");
      }
      if (other != static_cast<std::size_t>(call)) {
        throw CommError(title() + ": ranks differ: rank " + std::to_string(rank_) + " called " +
                        kNames[static_cast<std::size_t>(call)] + " while rank " +
                        std::to_string(r) + " called " + kNames[other]);
      }
      count = part.size() - kCollectiveHead;
    }
    inbox.counts.push_back(count);
    bytes += count;
  }
  inbox.bytes.clear();
  make_room(inbox.bytes, bytes);
  for (int r = 0; r < size_; ++r) {
    append(inbox.bytes, r == rank_ ? own : message(tag, r).subspan(kCollectiveHead));
  }
  release(tag);
}

void Communicator::all_to_all(std::span<const std::byte> send, std::span<const std::size_t> counts,
                              Inbox& inbox) {
  if (counts.size() != at(size())) {
    throw std::invalid_argument("all_to_all: " + std::to_string(counts.size()) + " counts for " +
                                std::to_string(size()) + " ranks");
  }
  if (total(counts) != send.size()) {
    throw std::invalid_argument("all_to_all: counts add up to " + std::to_string(total(counts)) +
                                ", but there are " + std::to_string(send.size()) +
                                " bytes to send");
  }
  exchange_parts(
      Call::all_to_all,
      [&](int peer) {
        const auto start = std::accumulate(counts.begin(), counts.begin() + peer, std::size_t{0});
        return send.subspan(start, counts[at(peer)]);
      },
      inbox);
}

void Communicator::all_gather(std::span<const std::byte> mine, Inbox& inbox) {
  exchange_parts(
      Call::all_gather, [&](int) { return mine; }, inbox);
}

void Communicator::broadcast(std::span<std::byte> bytes, int root) {
  if (root < 0 || root >= size()) {
    throw std::invalid_argument("broadcast: root " + std::to_string(root) +
                                " is not a rank from 0 to " + std::to_string(size() - 1));
  }
  if (size() == 1) return;
  // Everyone sends, so that ranks with other roots or lengths find out.
  const std::span<const std::byte> mine = rank() == root ? bytes : std::span<std::byte>();
  exchange_parts(
      Call::broadcast, [&](int) { return mine; }, scratch_);
  for (std::size_t r = 0; r < at(size()); ++r) {
    check_part("broadcast", *this, r, r == at(root) ? bytes.size() : 0, scratch_.counts[r]);
  }
  if (rank() != root) std::ranges::copy(scratch_.from(root), bytes.begin());
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
  const auto ranks = at(size());
  const auto start = [&](std::size_t part) { return values.size() * part / ranks; };
  counts_.resize(ranks);
  for (std::size_t r = 0; r < ranks; ++r) counts_[r] = (start(r + 1) - start(r)) * sizeof(float);

  const auto me = at(rank());
  const auto mine = values.subspan(start(me), start(me + 1) - start(me));
  all_to_all(std::as_bytes(values), counts_, scratch_);
  for (std::size_t r = 0; r < ranks; ++r) {
    check_part("all_reduce", *this, r, counts_[me], scratch_.counts[r]);
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
    check_part("all_reduce", *this, r, counts_[r], scratch_.counts[r]);
  }
  std::ranges::copy(scratch_.bytes, std::as_writable_bytes(values).begin());
}

void Communicator::native_all_reduce(std::span<float> values) {
  if (!has_native_all_reduce()) {
    throw std::invalid_argument(
        "reduce=native: this communicator has no all-reduce of its own; use reduce=ordered");
  }
  if (size() == 1 || values.empty()) return;
  announce_native_all_reduce(values.size());
  do_native_all_reduce(values);
}

void Communicator::announce_native_all_reduce(std::size_t values) {
  flush();
  stay();
  // What a ring would send; how many bytes it really is the transport does not say.
  const std::uint64_t bytes = 2 * values * sizeof(float) * at(size() - 1) / at(size());
  traffic_.bytes_sent += bytes;
  traffic_.bytes_received += bytes;
  native_here_ += bytes;
  ++traffic_.messages;
}

void Communicator::barrier() {
  if (size() == 1) return;
  exchange_parts(
      Call::barrier, [](int) { return std::span<const std::byte>(); }, scratch_);
}

}  // namespace topreduce::comm
