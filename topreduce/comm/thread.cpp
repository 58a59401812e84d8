// Ranks as threads of one process: who sends puts the frame into the receiver's mailbox.

#include "topreduce/comm/thread.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace topreduce::comm {
namespace {

using Mailboxes = std::vector<std::shared_ptr<Mailbox>>;

constexpr char kLeft[] = "has left the group";

class ThreadRank final : public Communicator {
 public:
  ThreadRank(int rank, std::shared_ptr<const Mailboxes> all)
      : Communicator(rank, static_cast<int>(all->size()), (*all)[at(rank)]), all_(std::move(all)) {}
  ~ThreadRank() override {
    for (const auto& mailbox : *all_) mailbox->lose(rank(), Loss::gone, kLeft);
  }

  bool has_native_all_reduce() const override { return true; }

 protected:
  // Backwards: as with any engine, the order is not that of the ranks.
  void do_native_all_reduce(std::span<float> values) override {
    if (std::exchange(epoch_, mailbox().epoch()) != mailbox().epoch()) natives_ = 0;
    const Tag tag{kNative, natives_++};
    const auto mine = std::as_bytes(std::span<const float>(values));
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      expect(tag, peer);
      post(peer, tag, {}, mine);
    }
    wait(tag, at(size() - 1));
    own_.assign(mine.begin(), mine.end());
    std::ranges::fill(values, 0.0f);
    for (int r = size(); r-- > 0;) {
      const std::span<const std::byte> part = r == rank() ? own_ : message(tag, r);
      if (part.size() != values.size_bytes()) {
        throw CommError(mailbox().title(rank()) + ", " + to_string(mailbox().place(), tag) +
                        ": rank " + std::to_string(r) + " has another number of values");
      }
      for (std::size_t i = 0; i < values.size(); ++i) {
        float value;
        std::memcpy(&value, part.data() + i * sizeof(float), sizeof(float));
        values[i] += value;
      }
    }
    release(tag);
  }
  void send_frame(int peer, std::span<const std::byte> frame) override {
    (*all_)[at(peer)]->accept(rank(), frame);
  }
  void hand_over(int peer, Bytes& frame) override { (*all_)[at(peer)]->accept(rank(), frame); }

 private:
  std::shared_ptr<const Mailboxes> all_;
  Bytes own_;
  std::uint32_t epoch_ = 0, natives_ = 0;  // all-reduces of the epoch
};

// Whether an error says only that another rank went away, for whatever made it go.
bool is_consequence(const CommError& error) {
  return std::string_view(error.what()).find(kLeft) != std::string_view::npos;
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_group(int ranks) {
  if (ranks < 1) {
    throw std::invalid_argument("make_thread_group: a group has at least 1 rank, not " +
                                std::to_string(ranks));
  }
  auto mailboxes = std::make_shared<Mailboxes>();
  for (int r = 0; r < ranks; ++r) mailboxes->push_back(std::make_shared<Mailbox>(ranks));
  std::vector<std::unique_ptr<Communicator>> group;
  for (int r = 0; r < ranks; ++r) group.push_back(std::make_unique<ThreadRank>(r, mailboxes));
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
    } catch (const CommError& error) {
      keep_first(is_consequence(error) ? consequence : cause);
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
