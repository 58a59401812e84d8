// A step happens on every rank or not at all: after an infinity, a NaN, a failed call or a damaged
// message everything is bit for bit as before, and the run goes on as if nothing had happened.

#include <barrier>
#include <cmath>
#include <limits>
#include <memory>

#include "cluster.h"
#include "topreduce/comm/decorator.h"
#include "topreduce/reducer.h"

namespace topreduce::laws {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- a transport that fails --------------------------------------------------------------------

enum class Failure {
  everyone_before,  // no byte of a message leaves any rank
  everyone_after,   // the message leaves, then the connection breaks
  one_leaves,       // rank 0 gives up; the others wait for it in vain
  damage            // one bit of the message is wrong
};

/// Fails at one of the messages that this rank posts.
class Failing final : public comm::Decorator {
 public:
  Failing(Communicator& inner, Failure failure, std::uint64_t fail_at)
      : Decorator(inner), failure_(failure), left_(fail_at) {}

  void post(int peer, const comm::Tag& tag, std::span<const std::byte> head,
            std::span<const std::byte> bytes) override {
    const bool now = left_-- == 0;
    const bool gives_up =
        failure_ == Failure::everyone_before || (failure_ == Failure::one_leaves && rank() == 0);
    if (now && gives_up) throw CommError("pulled the plug");
    if (!now || failure_ != Failure::damage) {
      Decorator::post(peer, tag, head, bytes);
    } else {
      Bytes message(head.begin(), head.end());
      message.insert(message.end(), bytes.begin(), bytes.end());
      message[message.size() / 2] ^= std::byte{4};
      Decorator::post(peer, tag, {}, message);
    }
    if (now && failure_ == Failure::everyone_after) {
      flush();
      throw CommError("pulled the plug");
    }
  }

 private:
  Failure failure_;
  std::uint64_t left_;
};

// ---- two clusters side by side -----------------------------------------------------------------

/// A run that things happen to, and one that is spared.
class Transaction : public testing::TestWithParam<const char*> {
 protected:
  void start(int ranks, Handing handing = Handing::add) {
    ranks_ = ranks;
    handing_ = handing;
    step_ = 0;
    tried_ = std::make_unique<Cluster>(ranks, layout_, GetParam());
    spared_ = std::make_unique<Cluster>(ranks, layout_, GetParam());
    tried_->hand_over_by(handing);
  }

  std::vector<Floats> gradients() const {
    return gradients_of(ranks_, step_,
                        [&](int r, int step) { return heavy_tailed(r, step, layout_); });
  }

  std::vector<State> states() {
    std::vector<State> all;
    for (Reducer& reducer : tried_->reducers()) all.push_back(state_of(reducer));
    return all;
  }

  /// How many messages each rank will send if they compare their settings anew, as they do after a
  /// failure: a copy of the run goes ahead.
  std::vector<std::uint64_t> messages_of_next_step() {
    Cluster copy(ranks_, layout_, GetParam());
    const auto now = states();
    for (int r = 0; r < ranks_; ++r) {
      Loader loader(now[static_cast<std::size_t>(r)]);
      copy[r].visit(loader);
    }
    std::vector<std::uint64_t> messages;
    for (const Outcome& outcome : copy.step(gradients(), cut_)) {
      messages.push_back(outcome.traffic.messages);
    }
    return messages;
  }

  /// A step of both.
  void expect_same_step() {
    const auto got = tried_->step(gradients(), cut_);
    const auto want = spared_->step(gradients(), cut_);
    for (std::size_t r = 0; r < got.size(); ++r) {
      EXPECT_EQ(got[r].error, "");
      EXPECT_TRUE(same_bits(got[r].gradient, want[r].gradient)) << "step " << step_;
      EXPECT_EQ(got[r].state, want[r].state) << "step " << step_;
    }
    ++step_;
  }

  /// Fails the coming step, in which the ranks send so many `messages`, at the `message`-th of
  /// every rank, or the last of one that sends fewer; then compares what is left.
  void expect_nothing_happens(Failure failure, std::uint64_t message,
                              const std::vector<std::uint64_t>& messages) {
    SCOPED_TRACE("failure " + std::to_string(static_cast<int>(failure)) + " at message " +
                 std::to_string(message) + " of step " + std::to_string(step_));
    const auto before = states();
    const auto gradient = gradients();
    for (Reducer& reducer : tried_->reducers()) reducer.set_mode(Reducer::Mode::compress);
    const auto outcomes = tried_->step(gradient, cut_, 1, [&](Communicator& comm) {
      const std::uint64_t last = messages[static_cast<std::size_t>(comm.rank())] - 1;
      return std::make_unique<Failing>(comm, failure, std::min(message, last));
    });
    for (std::size_t r = 0; r < outcomes.size(); ++r) {
      EXPECT_TRUE(outcomes[r].failed());
      const bool kept = same_bits(outcomes[r].gradient, gradient[r]);
      EXPECT_TRUE(kept || handing_ != Handing::add);
      EXPECT_EQ(outcomes[r].state, before[r]);
    }
  }

  const Layout layout_ = small_model();
  const Cut cut_ = three_buckets(layout_);
  int ranks_ = 0;
  Handing handing_ = Handing::add;
  int step_ = 0;
  std::unique_ptr<Cluster> tried_, spared_;
};

INSTANTIATE_TEST_SUITE_P(Rows, Transaction, testing::ValuesIn(fewer_rows()),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(Transaction, FailedCallsLeaveNoTrace) {
  for (const int ranks : kSomeRanks) {
    start(ranks, ranks == 2 ? Handing::add : Handing::lend);
    // While they still agree on the method.
    const std::vector<std::uint64_t> some(static_cast<std::size_t>(ranks), 1);
    expect_nothing_happens(Failure::everyone_before, 0, some);
    for (int s = 0; s < 3; ++s) expect_same_step();
    for (const Failure failure :
         {Failure::everyone_before, Failure::everyone_after, Failure::one_leaves}) {
      expect_same_step();
      const auto messages = messages_of_next_step();
      const std::uint64_t most =
          failure == Failure::one_leaves ? messages[0] : std::ranges::max(messages);
      ASSERT_GT(std::ranges::min(messages), 0u);
      for (std::uint64_t i = 0; i < most; i += kMessageStep) {
        expect_nothing_happens(failure, i, messages);
      }
    }
    expect_same_step();
  }
}

// The message says where: rank, step, bucket, sender.
TEST_P(Transaction, DamagedMessagesLeaveNoTrace) {
  start(2, Handing::lend_and_deliver);
  for (int s = 0; s < 4; ++s) expect_same_step();
  const auto messages = messages_of_next_step();
  for (std::uint64_t i = 0; i < std::ranges::max(messages); ++i) {
    expect_nothing_happens(Failure::damage, i, messages);
  }
  const auto outcomes = tried_->step(gradients(), cut_, 1, [](Communicator& comm) {
    return std::make_unique<Failing>(comm, Failure::damage, 1);  // the first compares settings
  });
  const auto names_the_place = [&](std::size_t rank) {
    const std::string head = "rank " + std::to_string(rank) + ", step 4, bucket of parameter ";
    const std::string tail = ", message from rank " + std::to_string(1 - rank) + ": ";
    const std::string& text = outcomes[rank].error;
    return text.starts_with(head) && text.find(tail) == head.size() + 1;
  };
  EXPECT_TRUE(names_the_place(0) || names_the_place(1)) << outcomes[0].error << "\n"
                                                        << outcomes[1].error;
  expect_same_step();
}

// As in plain DDP, everyone sees that the step is lost, wherever the value was.
TEST_P(Transaction, NonFiniteStepsLeaveNoTrace) {
  for (const auto& [ranks, handing] :
       {std::pair(1, Handing::lend), {2, Handing::add}, {3, Handing::lend_and_deliver}}) {
    start(ranks, handing);
    for (int s = 0; s < 3; ++s) expect_same_step();
    for (std::size_t id = 0; id < layout_.count(); ++id) {
      if (layout_[id].size == 0) continue;
      auto gradient = gradients();
      const float kinds[] = {kNaN, kInfinity, -kInfinity};
      gradient[id % gradient.size()][layout_[id].offset + layout_[id].size / 2] = kinds[id % 3];
      const auto before = states();
      const auto outcomes = tried_->step(gradient, cut_);
      for (std::size_t r = 0; r < outcomes.size(); ++r) {
        EXPECT_EQ(outcomes[r].error, "");
        EXPECT_FALSE(outcomes[r].stats.finite);
        EXPECT_TRUE(std::ranges::all_of(outcomes[r].gradient, [](float x) { return x != x; }));
        EXPECT_EQ(outcomes[r].state, before[r]);
      }
      expect_same_step();
    }
  }
}

// The caller stops half way, or makes a mistake: the same.
TEST_P(Transaction, AbandonedStepsLeaveNoTrace) {
  start(2);
  std::barrier all_are_here(2);
  for (int s = 0; s < 3; ++s) expect_same_step();
  const auto before = states();
  const auto gradient = gradients();
  run_ranks(2, [&](Communicator& comm) {
    Reducer& reducer = (*tried_)[comm.rank()];
    Floats mine = gradient[static_cast<std::size_t>(comm.rank())];
    const Floats first(mine.begin(), mine.begin() + static_cast<std::ptrdiff_t>(layout_[0].size));
    const std::size_t ids[] = {0};
    Floats lent = first;
    reducer.begin(comm);
    reducer.lend(ids, lent);
    reducer.abandon();
    const std::span<float> part(mine.data(), first.size());
    reducer.begin(comm);
    reducer.add(ids, part);
    reducer.abandon();
    reducer.begin(comm);
    reducer.add(ids, part);
    EXPECT_THROW(reducer.add(ids, part), std::invalid_argument);
    EXPECT_TRUE(same_bits(part, first));
    all_are_here.arrive_and_wait();  // a rank that has left is missed by one that still adds
  });
  EXPECT_EQ(states(), before);
  expect_same_step();
}

}  // namespace
}  // namespace topreduce::laws
