// Ranks as threads of one process. A collective is two meetings: at the first every rank has
// offered where its bytes lie, then each copies what it needs, and at the second all are done.

#include "topreduce/comm/thread.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

namespace topreduce::comm {
namespace {

/// Another rank went away: a consequence of whatever made it go.
class Abandoned final : public CommError {
 public:
  using CommError::CommError;
};

/// What a rank brings to a collective. Its memory stays valid until all have copied from it.
struct Offer {
  std::string_view call;
  std::span<const std::byte> bytes;
  std::span<const std::size_t> counts = {};  ///< all_to_all: bytes for each rank
  int root = 0;                              ///< broadcast: who sends
};

class Meeting {
 public:
  explicit Meeting(int ranks) : offers_(static_cast<std::size_t>(ranks)) {}

  /// Returns once every rank has made its offer; they can be read until `part`.
  void gather(int rank, const Offer& offer) {
    std::unique_lock lock(mutex_);
    offers_[static_cast<std::size_t>(rank)] = offer;
    if (wait_for_all(lock)) return;
    throw Abandoned(std::string(offer.call) + " on rank " + std::to_string(rank) + ": rank " +
                    std::to_string(*left_) + " has left the group");
  }

  /// Returns once every rank is done with the offers. Nobody leaves in between, so all do come.
  void part() {
    std::unique_lock lock(mutex_);
    wait_for_all(lock);
  }

  /// From now on nobody waits: a group without one of its ranks cannot go on.
  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    if (!left_) left_ = rank;
    changed_.notify_all();
  }

  std::span<const Offer> offers() const { return offers_; }

 private:
  // False if somebody left instead. A meeting that took place counts, even if somebody left since.
  bool wait_for_all(std::unique_lock<std::mutex>& lock) {
    if (left_) return false;
    if (++present_ == offers_.size()) {
      present_ = 0;
      ++generation_;
      changed_.notify_all();
      return true;
    }
    const std::uint64_t waiting_in = generation_;
    changed_.wait(lock, [&] { return generation_ != waiting_in || left_; });
    return generation_ != waiting_in;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Offer> offers_;     // by rank
  std::size_t present_ = 0;       // ranks that wait for the next generation
  std::uint64_t generation_ = 0;  // meetings that took place
  std::optional<int> left_;       // the first rank that went away
};

// All ranks see the same offers, so all come to the same verdict and stay in step.
void check_same_call(std::span<const Offer> offers) {
  const Offer& first = offers.front();
  for (std::size_t r = 1; r < offers.size(); ++r) {
    const auto disagree = [&](const std::string& one, const std::string& other) {
      throw CommError("ranks differ: rank 0 called " + one + " while rank " + std::to_string(r) +
                      " called " + other);
    };
    const Offer& offer = offers[r];
    if (offer.call != first.call) disagree(std::string(first.call), std::string(offer.call));
    if (offer.root != first.root) {
      disagree("broadcast with root " + std::to_string(first.root),
               "it with root " + std::to_string(offer.root));
    }
    if (offer.call == "broadcast" && offer.bytes.size() != first.bytes.size()) {
      disagree("broadcast with " + std::to_string(first.bytes.size()) + " bytes",
               "it with " + std::to_string(offer.bytes.size()));
    }
  }
}

class ThreadRank final : public Communicator {
 public:
  ThreadRank(int rank, std::shared_ptr<Meeting> meeting)
      : rank_(rank), meeting_(std::move(meeting)) {}
  ~ThreadRank() override { meeting_->leave(rank_); }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(meeting_->offers().size()); }

 protected:
  void do_all_to_all(std::span<const std::byte> send, std::span<const std::size_t> counts,
                     Inbox& inbox) override {
    const auto me = static_cast<std::size_t>(rank_);
    collect({"all_to_all", send, counts}, inbox, [me](const Offer& offer) {
      std::size_t start = 0;
      for (std::size_t r = 0; r < me; ++r) start += offer.counts[r];
      return offer.bytes.subspan(start, offer.counts[me]);
    });
  }

  void do_all_gather(std::span<const std::byte> mine, Inbox& inbox) override {
    collect({"all_gather", mine}, inbox, [](const Offer& offer) { return offer.bytes; });
  }

  void do_broadcast(std::span<std::byte> bytes, int root) override {
    meet({"broadcast", bytes, {}, root}, [&](std::span<const Offer> offers) {
      if (rank_ == root) return;
      std::ranges::copy(offers[static_cast<std::size_t>(root)].bytes, bytes.begin());
    });
  }

  void do_barrier() override {
    meet({"barrier", {}}, [](std::span<const Offer>) {});
  }

 private:
  template <class Read>
  void meet(const Offer& mine, Read read) {
    meeting_->gather(rank_, mine);
    // Whatever goes wrong here, others may still be copying what this rank offered.
    std::exception_ptr failure;
    try {
      check_same_call(meeting_->offers());
      read(meeting_->offers());
    } catch (...) {
      failure = std::current_exception();
    }
    meeting_->part();
    if (failure) std::rethrow_exception(failure);
  }

  /// Fills `inbox` with `part_for_me` of every rank's offer.
  template <class PartForMe>
  void collect(const Offer& mine, Inbox& inbox, PartForMe part_for_me) {
    meet(mine, [&](std::span<const Offer> offers) {
      std::size_t total = 0;
      inbox.counts.clear();
      for (const Offer& offer : offers) {
        inbox.counts.push_back(part_for_me(offer).size());
        total += inbox.counts.back();
      }
      make_room(inbox.bytes, total);
      inbox.bytes.resize(total);
      auto next = inbox.bytes.begin();
      for (const Offer& offer : offers) next = std::ranges::copy(part_for_me(offer), next).out;
    });
  }

  int rank_;
  std::shared_ptr<Meeting> meeting_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_group(int ranks) {
  if (ranks < 1) {
    throw std::invalid_argument("make_thread_group: a group has at least 1 rank, not " +
                                std::to_string(ranks));
  }
  const auto meeting = std::make_shared<Meeting>(ranks);
  std::vector<std::unique_ptr<Communicator>> group;
  for (int r = 0; r < ranks; ++r) group.push_back(std::make_unique<ThreadRank>(r, meeting));
  return group;
}

void run_ranks(int ranks, const std::function<void(Communicator&)>& body) {
  std::mutex mutex;
  std::exception_ptr cause, consequence;
  const auto run = [&](Communicator& comm) {
    const auto keep_first = [&mutex](std::exception_ptr& kept) {
      const std::lock_guard lock(mutex);
      if (!kept) kept = std::current_exception();
    };
    try {
      body(comm);
    } catch (const Abandoned&) {
      keep_first(consequence);
    } catch (...) {
      keep_first(cause);
    }
  };
  {
    // The group goes before the threads are joined: if a thread cannot be started, its rank leaves
    // and those that already run do not wait for it.
    std::vector<std::jthread> threads;
    auto group = make_thread_group(ranks);
    for (auto& member : group) {
      threads.emplace_back([&run, comm = std::move(member)]() mutable {
        run(*comm);
        comm.reset();  // leaves only now, so what made it leave is kept before what follows from it
      });
    }
  }
  if (cause) std::rethrow_exception(cause);
  if (consequence) std::rethrow_exception(consequence);
}

}  // namespace topreduce::comm
