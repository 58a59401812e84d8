#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "topreduce/api.h"
#include "topreduce/comm/mailbox.h"
#include "topreduce/errors.h"
#include "topreduce/storage.h"

namespace topreduce::comm {

/// What passed through a communicator since it was made: messages and, once for each peer and
/// place, the head of a frame, but not the one byte of further frames, whose number varies from run
/// to run. A rank's own part does not travel.
struct Traffic {
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t messages = 0;  ///< sent
  std::uint64_t rounds = 0;    ///< collectives that every rank had to wait for
};

/// Bytes from every rank, in rank order, in one buffer that is reused from call to call.
struct TOPREDUCE_API Inbox {
  Bytes bytes;
  std::vector<std::size_t> counts;  ///< bytes from each rank

  std::span<const std::byte> from(int rank) const;
};

/// The pause between two polls: keeps the core busy for a while, then naps.
class TOPREDUCE_API Backoff {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Backoff(std::chrono::microseconds spin) : start_(Clock::now()), spin_(spin) {}
  void pause() const;
  Clock::duration waited() const { return Clock::now() - start_; }

 private:
  Clock::time_point start_;
  std::chrono::microseconds spin_;
};

/// Moves bytes between ranks; knows nothing of gradients. One thread at a time.
///
/// Below, messages from one rank to another, which wait for nobody: many can be under way, and what
/// is posted to a rank before `flush` travels together. Above, collectives, which all ranks call in
/// the same order. A peer that is gone is a CommError; ranks that are at different places of the
/// program get std::invalid_argument, all of them, and may go on.
class TOPREDUCE_API Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // ---- messages ----

  /// Starts another part of the program: with the first message that this rank sends in it, those
  /// of the last one that nobody took are dropped, and so are those that are still under way. All
  /// ranks must enter the same places in the same order.
  void enter(const Place& place);
  /// Takes the last `enter` back if nothing was sent since.
  void leave() noexcept;
  /// Whether no peer waits here for more: nothing was sent since the last `enter`, or all ranks
  /// have been told that they are at different places.
  bool in_step() const { return !sent_ || ended_by_all_; }

  /// Sends `head` and then `bytes` as one message to another rank. Both may change at once.
  virtual void post(int peer, const Tag& tag, std::span<const std::byte> head,
                    std::span<const std::byte> bytes);
  void flush();

  /// How long to wait for a peer from which nothing comes: after that it counts as lost, which is a
  /// CommError. For ever, unless a transport says otherwise. What a rank computes between its calls
  /// must take less on all ranks.
  virtual void set_timeout(std::chrono::milliseconds timeout);

  /// Says that this rank waits for a message from `peer`; until it is there, losing the peer is an
  /// error.
  void expect(const Tag& tag, int peer) { mailbox_->expect(tag, peer); }
  /// How many of those that this rank waits for are here.
  std::size_t arrived(const Tag& tag) const { return mailbox_->arrived(tag); }
  /// One that has arrived, until `release`.
  std::span<const std::byte> message(const Tag& tag, int peer) const {
    return mailbox_->message(tag, peer);
  }
  void release(const Tag& tag) { mailbox_->release(tag); }

  /// Takes in what has come, without waiting. A peer that has gone on without sending what is
  /// expected is no error yet, since this rank may drop this part of the program too.
  void poll();
  /// Before one waits: throws if what is expected will never come.
  void check_peers();
  /// Before one waits for the first time: silence counts from here.
  void start_waiting() { mailbox_->start_waiting(); }
  /// Sends what was posted, and waits until `count` messages of `tag` are here; any number of
  /// others may come in between, and `came` is called whenever some did.
  template <class Came>
  void wait(const Tag& tag, std::size_t count, Came&& came);
  void wait(const Tag& tag, std::size_t count) {
    wait(tag, count, [] {});
  }
  /// Sends what was posted, and waits until anything comes.
  void wait_for_any(std::uint64_t known);
  std::uint64_t version() const { return mailbox_->version(); }
  /// Waits until what was sent has left this rank, where bytes move only while the transport is
  /// called: before a rank computes for long, or peers wait for as long. Collectives end with it.
  virtual void drain() {}
  /// Frees memory far larger than what was sent and received since the last call: dense steps leave
  /// it.
  void trim();

  // ---- collectives ----

  /// Sends the first counts[0] bytes of `send` to rank 0, the next counts[1] to rank 1, and so on.
  /// Parts may be empty and of different lengths.
  void all_to_all(std::span<const std::byte> send, std::span<const std::size_t> counts,
                  Inbox& inbox);

  /// Sends `mine` to every rank; lengths may differ.
  void all_gather(std::span<const std::byte> mine, Inbox& inbox);

  /// Replaces `bytes` (same length everywhere) with those of `root`.
  void broadcast(std::span<std::byte> bytes, int root);

  /// Replaces `values` (same length everywhere) with their sum over the ranks, added in rank order:
  /// the same bits on every rank and in every run.
  void all_reduce(std::span<float> values);

  /// Returns once every rank has called it.
  void barrier();

  /// As all_reduce, by the transport's own all-reduce (MPI_Allreduce, Gloo's), which may add in any
  /// order. std::invalid_argument if it has none.
  void native_all_reduce(std::span<float> values);
  /// Counts one of so many values, which devices are about to do among themselves.
  void announce_native_all_reduce(std::size_t values);
  virtual bool has_native_all_reduce() const { return false; }

  Traffic traffic() const;
  /// Of the bytes received, those that belong to this place; some of them may have come before.
  std::uint64_t bytes_received_here() const {
    return mailbox_->bytes_received_here() + native_here_;
  }
  Mailbox& mailbox() { return *mailbox_; }
  const Mailbox& mailbox() const { return *mailbox_; }

 protected:
  Communicator(int rank, int size, std::shared_ptr<Mailbox> mailbox = nullptr);

  // What a transport implements: frames from rank to rank, in order, each whole or not at all.

  /// Starts to send a frame of at most `frame_limit` bytes; it may change once this returns. Waits
  /// for nobody, unless more is under way than memory should hold.
  virtual void send_frame(int peer, std::span<const std::byte> frame) = 0;
  /// The same for a buffer that the transport may keep, if it leaves another.
  virtual void hand_over(int peer, Bytes& frame) { send_frame(peer, frame); }
  /// Passes frames that have come to `mailbox().accept`, one at least if there are any. A transport
  /// whose frames are passed on by other threads does nothing, and says so by returning false.
  virtual bool receive_frames() { return false; }
  virtual void do_native_all_reduce(std::span<float>) {}
  /// More than the head of a frame.
  virtual std::size_t frame_limit() const { return std::size_t{1} << 30; }
  /// How long a wait for frames keeps its core busy before it naps between looks.
  virtual std::chrono::microseconds spin() const { return std::chrono::microseconds(100); }
  /// Between looks for frames: until some may have come, or for a while.
  virtual void pause(const Backoff& backoff) { backoff.pause(); }
  /// Called again and again while a wait for frames lasts; may throw to end it.
  virtual void still_waiting(Backoff::Clock::duration) {}
  /// Throws what ranks get that are at different places: all of them do, and may go on.
  [[noreturn]] virtual void misplaced(const std::string& text) const;

 private:
  friend class Decorator;
  enum class Call : std::uint8_t { all_to_all = 1, all_gather, broadcast, barrier };

  /// Bytes before a part of a collective.
  static constexpr std::size_t kCollectiveHead = 5;
  std::array<std::byte, kCollectiveHead> head_of(Call call, const Tag& tag,
                                                 std::span<const std::byte> part) const;

  void stay();
  void compare_places();
  template <class PartFor>
  void exchange_parts(Call call, PartFor&& part_for, Inbox& inbox);
  Tag next_collective();

  int rank_, size_;
  std::shared_ptr<Mailbox> mailbox_;
  struct Outgoing {
    Bytes stream;                             // room for the head of a frame, then messages
    std::uint32_t epoch = ~std::uint32_t{0};  // of the last frame
    std::size_t longest = 0;                  // since the last `trim`
  };
  std::size_t head_bytes(const Outgoing& to) const;
  std::vector<Outgoing> outgoing_;  // by peer
  bool sent_ = true;                // anything since the last `enter`
  bool ended_by_all_ = false;       // all ranks have ended this epoch
  Traffic traffic_;                 // received: by native all-reduces alone
  std::uint64_t native_here_ = 0;   // bytes received by them since the last `enter`
  std::uint32_t collectives_ = 0, collectives_before_ = 0;  // of this epoch and the last
  Inbox scratch_;
  std::vector<std::size_t> counts_;  // all_reduce: bytes of each rank's part
};

template <class Came>
void Communicator::wait(const Tag& tag, std::size_t count, Came&& came) {
  flush();
  start_waiting();
  for (;;) {
    const std::uint64_t known = version();
    const bool done = arrived(tag) >= count;
    check_peers();  // after that: what has arrived may be of another place
    came();
    if (done) return;
    wait_for_any(known);
  }
}

}  // namespace topreduce::comm

namespace topreduce {
using comm::Communicator;
}
