#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "topreduce/comm/decorator.h"
#include "topreduce/errors.h"

// Faults of a network and of its machines, one at a time, at a chosen message of a chosen rank.

namespace topreduce::faults {

enum class Fault {
  kill,       // the rank dies; its peers' systems notice
  stop,       // the rank stands still, or its machine loses its power: nobody is told
  delay,      // a message takes its time
  drop,       // the connection to a peer breaks
  flip,       // one bit is wrong
  cut,        // the end of a frame is missing
  duplicate,  // a frame comes twice
  reorder     // a frame comes behind the next one to the same peer
};
inline constexpr std::array<const char*, 8> kFaultNames = {"kill", "stop", "delay",     "drop",
                                                           "flip", "cut",  "duplicate", "reorder"};

/// A message that a rank sends.
struct Target {
  int rank = 0;
  std::uint64_t step = 0;
  comm::Phase phase = comm::Phase::exchange;
  std::optional<std::uint32_t> round{};  ///< none: any
  std::optional<int> peer{};             ///< to whom; none: anyone
  std::uint64_t skip = 0;                ///< how many of those go well before
};

/// What a rank that dies, or stops, throws in the end. Its words are no more than that.
class Killed final : public CommError {
 public:
  static constexpr const char* kText = "killed by a test";
  Killed() : CommError(kText) {}
};

/// One fault, which all ranks of a group share.
class Incident {
 public:
  using Clock = std::chrono::steady_clock;

  /// `seed` decides which bit is wrong and where a frame is cut.
  Incident(int ranks, Fault fault, Target target, std::uint32_t seed = 0,
           std::chrono::milliseconds delay = std::chrono::milliseconds(5))
      : fault_(fault), target_(target), seed_(seed), delay_(delay), mailboxes_(comm::at(ranks)) {}

  Fault fault() const { return fault_; }
  std::uint32_t seed() const { return seed_; }
  std::chrono::milliseconds delay() const { return delay_; }
  bool struck() const {
    const std::lock_guard lock(mutex_);
    return struck_;
  }
  /// Messages that were like the target, struck or not.
  std::uint64_t matches() const {
    const std::lock_guard lock(mutex_);
    return matches_;
  }
  /// From the fault until the last of the others had ended.
  double seconds() const {
    const std::lock_guard lock(mutex_);
    return struck_ ? std::chrono::duration<double>(ended_ - when_).count() : 0;
  }

  bool strikes(int rank, const comm::Place& place, const comm::Tag& tag, int peer) {
    if (rank != target_.rank || place.step != target_.step ||
        comm::phase_of(place, tag) != target_.phase ||
        tag.round != target_.round.value_or(tag.round) || peer != target_.peer.value_or(peer)) {
      return false;
    }
    const std::lock_guard lock(mutex_);
    if (matches_++ != target_.skip || struck_) return false;
    struck_ = true;
    when_ = ended_ = Clock::now();
    return true;
  }

  void come(int rank, comm::Mailbox& mailbox) {
    const std::lock_guard lock(mutex_);
    mailboxes_[comm::at(rank)] = &mailbox;
    ++present_;
  }
  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    mailboxes_[comm::at(rank)] = nullptr;
    --present_;
    if (rank != target_.rank) ended_ = Clock::now();
    changed_.notify_all();
  }
  /// Until all others have left.
  void stand_still() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return present_ == 1; });
  }
  void disconnect(int one, int other) {
    const std::lock_guard lock(mutex_);
    for (const auto& [here, there] : {std::pair(one, other), {other, one}}) {
      if (auto* mailbox = mailboxes_[comm::at(here)]) {
        mailbox->lose(there, comm::Loss::gone, "is gone: the connection was closed");
      }
    }
  }

 private:
  const Fault fault_;
  const Target target_;
  const std::uint32_t seed_;
  const std::chrono::milliseconds delay_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<comm::Mailbox*> mailboxes_;  // null: not here
  int present_ = 0;
  bool struck_ = false;
  std::uint64_t matches_ = 0;
  Clock::time_point when_, ended_;
};

/// A rank to whose messages the fault happens, if they are the target.
class Faulty final : public comm::Decorator {
 public:
  Faulty(Communicator& inner, Incident& incident) : Decorator(inner), incident_(&incident) {
    incident_->come(rank(), mailbox());
  }
  ~Faulty() override { incident_->leave(rank()); }

  void post(int peer, const comm::Tag& tag, std::span<const std::byte> head,
            std::span<const std::byte> bytes) override {
    if (!incident_->strikes(rank(), mailbox().place(), tag, peer)) {
      return Decorator::post(peer, tag, head, bytes);
    }
    flush();  // what was posted before leaves as ever
    switch (incident_->fault()) {
      case Fault::stop: incident_->stand_still(); [[fallthrough]];
      case Fault::kill: throw Killed();
      default: break;
    }
    Decorator::post(peer, tag, head, bytes);
    struck_peer_ = peer;
    flush();
    struck_peer_ = -1;
  }

 protected:
  // As one more message of an exchange, to nobody in particular: the rank can die here, or stop.
  void do_native_all_reduce(std::span<float> values) override {
    if (incident_->strikes(rank(), mailbox().place(), {comm::kNative, 0}, rank())) {
      if (incident_->fault() == Fault::stop) incident_->stand_still();
      throw Killed();
    }
    Decorator::do_native_all_reduce(values);
  }
  void send_frame(int peer, std::span<const std::byte> frame) override {
    if (peer != struck_peer_) {
      Decorator::send_frame(peer, frame);
      if (peer == kept_peer_) Decorator::send_frame(std::exchange(kept_peer_, -1), kept_);
      return;
    }
    Bytes changed(frame.begin(), frame.end());
    const std::uint32_t seed = incident_->seed();
    switch (incident_->fault()) {
      case Fault::delay: std::this_thread::sleep_for(incident_->delay()); break;
      case Fault::drop: return incident_->disconnect(rank(), peer);
      case Fault::flip: changed[seed / 8 % changed.size()] ^= std::byte{1} << seed % 8; break;
      case Fault::cut: changed.resize(seed % changed.size()); break;
      case Fault::duplicate: Decorator::send_frame(peer, frame); break;
      case Fault::reorder:
        kept_ = std::move(changed);
        kept_peer_ = peer;
        return;
      default: break;
    }
    Decorator::send_frame(peer, changed);
  }

 private:
  Incident* incident_;
  int struck_peer_ = -1, kept_peer_ = -1;
  Bytes kept_;
};

}  // namespace topreduce::faults
