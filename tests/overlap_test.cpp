// Exchanges side by side: ranks add their gradients in any order, frames come late and in any order
// between peers, a step stops in its middle. Nothing of it changes a bit.

#include <atomic>
#include <barrier>
#include <chrono>
#include <deque>
#include <map>
#include <random>
#include <thread>

#include "cluster.h"
#include "topreduce/comm/decorator.h"
#include "topreduce/comm/self.h"
#include "topreduce/reducer.h"

namespace topreduce::laws {
namespace {

constexpr const char* kMethods[] = {
    "dense",
    "dense:values=bf16,feedback=residual",
    "topk:density=0.05,values=fp32",
    "topk:density=0.2,values=int4,keep_dense=*bias",
    "topk:density=0.05,values=fp32,warmup_steps=2,ramp_steps=2",
    "topk_dsa:density=0.2,values=bf16",
    "gtopk:density=0.1,values=bf16",
    "gtopk:density=0.05,values=fp32,warmup_steps=1",
    "ok_topk:density=0.1,values=fp32,period=3,tau=2,balance=1",
    "ok_topk:density=0.2,values=int4,period=2,tau=2,balance=1,warmup_steps=2,keep_dense=*bias",
    "ok_topk:density=0.1,values=fp32,granularity=model,period=2,tau=3",
    "arc_topk:density=0.2,values=fp32",
    "arc_topk:density=0.1,values=bf16,width=16,random=0.25,keep_dense=*bias",
    "randk:density=0.1,values=fp32",
};
constexpr int kOverlapSteps = 6;

using Sequence = std::vector<std::size_t>;

Sequence in_order(std::size_t count) {
  Sequence order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  return order;
}

Sequence any_order(std::size_t count, std::mt19937& rng) {
  Sequence order = in_order(count);
  std::ranges::shuffle(order, rng);
  return order;
}

void add_one(Reducer& reducer, std::size_t id, std::span<float> gradient) {
  const std::size_t ids[] = {id};
  const Parameter& parameter = reducer.layout()[id];
  reducer.add(ids, gradient.subspan(parameter.offset, parameter.size));
}

/// A step on one rank, one parameter after the other; `before_finish` is called when all are there.
template <class BeforeFinish>
Outcome take_step(Reducer& reducer, Communicator& comm, const Floats& gradient,
                  const Sequence& order, BeforeFinish&& before_finish) {
  Outcome outcome;
  outcome.gradient = gradient;
  reducer.begin(comm);
  for (const std::size_t id : order) add_one(reducer, id, outcome.gradient);
  before_finish();
  outcome.stats = reducer.finish();
  outcome.state = state_of(reducer);
  return outcome;
}
Outcome take_step(Reducer& reducer, Communicator& comm, const Floats& gradient,
                  const Sequence& order) {
  return take_step(reducer, comm, gradient, order, [] {});
}

void expect_all_same(const std::vector<Outcome>& got, const std::vector<Outcome>& want) {
  for (std::size_t r = 0; r < got.size(); ++r) {
    EXPECT_TRUE(same_bits(got[r].gradient, want[r].gradient)) << "rank " << r;
    EXPECT_EQ(got[r].state, want[r].state) << "rank " << r;
  }
}

class Overlap : public testing::TestWithParam<const char*> {
 protected:
  std::vector<Floats> gradients(int ranks, int step) const {
    return gradients_of(ranks, step, [&](int r, int s) { return heavy_tailed(r, s, layout_); });
  }
  /// Steps that `turn` takes on every rank, beside steps in one order.
  template <class Taking>
  void expect_no_difference(int ranks, Taking&& turn) const {
    Cluster plain(ranks, layout_, GetParam()), tried(ranks, layout_, GetParam());
    for (int s = 0; s < kOverlapSteps; ++s) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, step " + std::to_string(s));
      const auto given = gradients(ranks, s);
      const auto want = meet(plain.reducers(), [&](Reducer& reducer, Communicator& comm) {
        return take_step(reducer, comm, given[comm::at(comm.rank())], in_order(layout_.count()));
      });
      const auto got = meet(tried.reducers(), [&](Reducer& reducer, Communicator& comm) {
        std::mt19937 rng(static_cast<unsigned>(100 * s + comm.rank()));
        return turn(reducer, comm, given[comm::at(comm.rank())], rng);
      });
      expect_all_same(got, want);
    }
  }

  const Layout layout_ = small_model();
};

INSTANTIATE_TEST_SUITE_P(Methods, Overlap, testing::ValuesIn(kMethods),
                         [](const auto& test) { return name_of(test.param); });

const std::vector<int> kGroups = !kLong       ? std::vector{kSanitized ? 3 : 5}
                                 : kSanitized ? std::vector{2, 5}
                                              : std::vector{2, 3, 5, 8};

// ---- orders and delays -------------------------------------------------------------------------

TEST_P(Overlap, EveryRankMayHaveItsOwnOrder) {
  for (const int ranks : kGroups) {
    expect_no_difference(ranks, [&](Reducer& reducer, Communicator& comm, const Floats& gradient,
                                    std::mt19937& rng) {
      return take_step(reducer, comm, gradient, any_order(layout_.count(), rng));
    });
  }
}

/// Lets no frame out until it is told to.
class Holding final : public comm::Decorator {
 public:
  using Decorator::Decorator;

  void let_go() {
    held_ = false;
    for (const auto& [peer, frame] : frames_) Decorator::send_frame(peer, frame);
    frames_.clear();
  }
  void hold() { held_ = true; }
  std::size_t frames() const { return frames_.size(); }

 protected:
  void send_frame(int peer, std::span<const std::byte> frame) override {
    if (!held_) return Decorator::send_frame(peer, frame);
    frames_.emplace_back(peer, Bytes(frame.begin(), frame.end()));
  }

 private:
  bool held_ = false;
  std::vector<std::pair<int, Bytes>> frames_;
};

TEST_P(Overlap, AllExchangesMayBeUnderWayAtOnce) {
  for (const int ranks : kGroups) {
    expect_no_difference(ranks, [&](Reducer& reducer, Communicator& inner, const Floats& gradient,
                                    std::mt19937& rng) {
      Holding comm(inner);
      Outcome outcome;
      outcome.gradient = gradient;
      reducer.begin(comm);
      comm.hold();
      for (const std::size_t id : any_order(layout_.count(), rng)) {
        add_one(reducer, id, outcome.gradient);
      }
      comm.let_go();
      outcome.stats = reducer.finish();
      outcome.state = state_of(reducer);
      return outcome;
    });
  }
}

/// Delivers frames late, those to different peers in any order; those to one peer in theirs.
class Delaying final : public comm::Decorator {
 public:
  Delaying(Communicator& inner, std::mt19937& rng)
      : Decorator(inner), rng_(rng), queues_(comm::at(inner.size())) {}
  ~Delaying() override { deliver_all(); }

  void drain() override { deliver_all(); }

 protected:
  void send_frame(int peer, std::span<const std::byte> frame) override {
    queues_[comm::at(peer)].emplace_back(frame.begin(), frame.end());
  }
  bool receive_frames() override {
    const std::size_t some = rng_() % queues_.size();
    for (std::size_t i = 0; i < queues_.size(); ++i) {
      if (rng_() % 4 == 0) deliver((some + i) % queues_.size(), 1 + rng_() % 3);
    }
    return true;
  }

 private:
  void deliver(std::size_t peer, std::size_t count) {
    for (auto& queue = queues_[peer]; count > 0 && !queue.empty(); --count) {
      Decorator::send_frame(static_cast<int>(peer), queue.front());
      queue.pop_front();
    }
  }
  void deliver_all() {
    for (std::size_t peer = 0; peer < queues_.size(); ++peer) deliver(peer, queues_[peer].size());
  }

  std::mt19937& rng_;
  std::vector<std::deque<Bytes>> queues_;
};

TEST_P(Overlap, FramesMayComeLate) {
  for (const int ranks : kGroups) {
    expect_no_difference(ranks, [&](Reducer& reducer, Communicator& inner, const Floats& gradient,
                                    std::mt19937& rng) {
      Delaying comm(inner, rng);
      return take_step(reducer, comm, gradient, any_order(layout_.count(), rng));
    });
  }
}

TEST_P(Overlap, ProgressMayBeAskedForAtAnyTime) {
  expect_no_difference(
      3, [&](Reducer& reducer, Communicator& comm, const Floats& gradient, std::mt19937& rng) {
        Outcome outcome;
        outcome.gradient = gradient;
        reducer.progress();
        reducer.begin(comm);
        for (const std::size_t id : any_order(layout_.count(), rng)) {
          for (auto n = rng() % 3; n > 0; --n) reducer.progress();
          add_one(reducer, id, outcome.gradient);
        }
        for (int n = 0; n < 20; ++n) reducer.progress();
        outcome.stats = reducer.finish();
        reducer.progress();
        outcome.state = state_of(reducer);
        return outcome;
      });
}

// ---- what is sent ------------------------------------------------------------------------------

/// Counts messages of exchanges, by exchange and by peer and round of it.
class Counting final : public comm::Decorator {
 public:
  using Counts = std::map<std::uint32_t, std::map<std::pair<int, std::uint32_t>, int>>;
  Counting(Communicator& inner, Counts& counts) : Decorator(inner), counts_(counts) {}

  void post(int peer, const comm::Tag& tag, std::span<const std::byte> head,
            std::span<const std::byte> bytes) override {
    Decorator::post(peer, tag, head, bytes);
    constexpr std::uint32_t kFirstReserved = 0xfffffffe;  // the vote; collectives
    if (tag.exchange < kFirstReserved) ++counts_[tag.exchange][{peer, tag.round}];
  }

 private:
  Counts& counts_;
};

TEST_P(Overlap, APeerGetsOneMessageInARound) {
  for (const int ranks : kGroups) {
    Cluster cluster(ranks, layout_, GetParam());
    for (int s = 0; s < kOverlapSteps; ++s) {
      std::vector<Counting::Counts> counts(comm::at(ranks));
      cluster.step(gradients(ranks, s), per_parameter(layout_), 1, [&](Communicator& comm) {
        return std::make_unique<Counting>(comm, counts[comm::at(comm.rank())]);
      });
      for (const auto& of_rank : counts) {
        EXPECT_FALSE(of_rank.empty());
        for (const auto& [exchange, messages] : of_rank) {
          for (const auto& [where, count] : messages)
            EXPECT_EQ(count, 1) << "exchange " << exchange;
        }
      }
    }
  }
}

TEST(GTopkMessages, AreThoseOfATree) {
  const Layout layout = small_model();
  for (const int ranks : {2, 3, 5, 8, 16, 17}) {
    std::size_t rounds = 0;
    while (1 << rounds < ranks) ++rounds;
    for (const char* row : {"gtopk:density=0.1", "gtopk:density=0.1,granularity=model"}) {
      Cluster cluster(ranks, layout, row);
      std::vector<Counting::Counts> counts(comm::at(ranks));
      const auto gradients =
          gradients_of(ranks, 0, [&](int r, int s) { return heavy_tailed(r, s, layout); });
      cluster.step(gradients, one_bucket(layout), 1, [&](Communicator& comm) {
        return std::make_unique<Counting>(comm, counts[comm::at(comm.rank())]);
      });
      std::map<std::uint32_t, std::size_t> all;
      for (const auto& of_rank : counts) {
        for (const auto& [exchange, messages] : of_rank) {
          EXPECT_LE(messages.size(), 2 * rounds) << ranks << " ranks, exchange " << exchange;
          all[exchange] += messages.size();
        }
      }
      for (const auto& [exchange, messages] : all) {
        EXPECT_EQ(messages, 2 * comm::at(ranks - 1)) << "each edge up and down";
      }
    }
  }
}

// ---- the limit ---------------------------------------------------------------------------------

// More than may be under way at once (kMostUnderWay in reducer.cpp).
constexpr std::size_t kWide = std::size_t{1} << 21, kWideCount = 6;

Layout wide_model() {
  std::vector<Parameter> parameters;
  for (std::size_t i = 0; i < kWideCount; ++i) {
    parameters.push_back({.name = "p" + std::to_string(i), .shape = {kWide}});
  }
  return Layout(std::move(parameters));
}

Floats wide_gradient(int rank) {
  Floats gradient(kWide * kWideCount);
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    gradient[i] = static_cast<float>((i * 7 + comm::at(rank)) % 61);
  }
  return gradient;
}

void expect_mean(const Floats& gradient, int ranks) {
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    float sum = 0;
    for (int r = 0; r < ranks; ++r) sum += static_cast<float>((i * 7 + comm::at(r)) % 61);
    if (gradient[i] == sum / static_cast<float>(ranks)) continue;
    ADD_FAILURE() << "entry " << i << " is " << gradient[i];
    return;
  }
}

// Where they have a place of their own; another one may be named until the end.
TEST(Lending, MeansAreWrittenBeforeTheVote) {
  const Layout layout({{"a", {6}}, {"b", {6}}});
  Reducer reducer(layout, "topk:density=0.5,bucket_cap_mb=0,warmup_steps=0,ramp_steps=0");
  comm::Self alone;
  const std::size_t a[] = {0}, b[] = {1};
  Floats of_a = {1, 9, 2, 8, 3, 7}, of_b = {6, 1, 5, 2, 4, 3}, means(6), elsewhere(6);
  ASSERT_TRUE(reducer.borrows());
  reducer.begin(alone);
  reducer.lend(b, of_b);
  reducer.lend(a, of_a);
  reducer.progress();
  reducer.deliver_to(a, means);
  EXPECT_TRUE(std::ranges::any_of(means, [](float mean) { return mean != 0; }));
  reducer.deliver_to(a, elsewhere);
  EXPECT_TRUE(same_bits(elsewhere, means));
  reducer.finish();
  EXPECT_TRUE(same_bits(elsewhere, means));
}

// Until the vote it holds what was owed before.
TEST(Lending, MeansAreNotWrittenIntoWhatWasLentBeforeTheVote) {
  const Layout layout({{"a", {6}}, {"b", {6}}});
  Reducer reducer(layout, "topk:density=0.5,bucket_cap_mb=0,warmup_steps=0,ramp_steps=0");
  comm::Self alone;
  const std::size_t a[] = {0}, both[] = {0, 1};
  Floats first = {1, 9, 2, 8, 3, 7, 6, 1, 5, 2, 4, 3}, of_a = {7, 3, 8, 2, 9, 1};
  reducer.begin(alone);
  reducer.add(both, first);
  reducer.finish();
  const auto before = state_of(reducer);
  reducer.begin(alone);
  reducer.lend(a, of_a);
  reducer.progress();
  reducer.deliver_to(a, of_a);
  reducer.abandon();
  EXPECT_EQ(state_of(reducer), before);
}

TEST(UnderWay, ALargeModelInAnyOrderEnds) {
  const Layout layout = wide_model();
  for (const int ranks : kSomeRanks) {
    Cluster cluster(ranks, layout, "dense:values=fp32");
    for (int s = 0; s < 2; ++s) {  // the order of buckets changes after the first
      run_ranks(ranks, [&](Communicator& comm) {
        std::mt19937 rng(static_cast<unsigned>(comm.rank()));
        Sequence order = in_order(kWideCount);
        if (comm.rank() == 1) std::ranges::reverse(order);
        if (comm.rank() == 2) order = any_order(kWideCount, rng);
        expect_mean(
            take_step(cluster[comm.rank()], comm, wide_gradient(comm.rank()), order).gradient,
            ranks);
      });
    }
  }
}

// A rank that is ahead sends no more than the limit, and the first of the plan.
TEST(UnderWay, IsLimited) {
  const Layout layout = wide_model();
  for (const bool backwards : {false, true}) {
    Cluster cluster(2, layout, "dense:values=fp32");
    std::atomic<bool> all_added = false;
    run_ranks(2, [&](Communicator& comm) {
      Floats gradient = wide_gradient(comm.rank());
      Sequence order = in_order(kWideCount);
      if (backwards) std::ranges::reverse(order);  // as the plan has it
      Reducer& reducer = cluster[comm.rank()];
      reducer.begin(comm);
      while (comm.rank() == 1 && !all_added) std::this_thread::yield();
      const std::uint64_t before = comm.traffic().messages;
      for (const std::size_t id : order) add_one(reducer, id, gradient);
      for (int n = 0; n < 3; ++n) reducer.progress();
      if (comm.rank() == 0) {
        constexpr std::uint64_t kLimit = (std::uint64_t{1} << 23) / kWide;
        EXPECT_GE(comm.traffic().messages - before, kLimit);
        EXPECT_LE(comm.traffic().messages - before, kLimit + (backwards ? 0 : 1));
        all_added = true;
      }
      reducer.finish();
      expect_mean(gradient, 2);
    });
  }
}

// ---- steps that stop in their middle -----------------------------------------------------------

/// Adds the first `count` parameters of a step that is never finished.
void start_step(Reducer& reducer, Communicator& comm, std::span<float> gradient,
                std::size_t count) {
  reducer.begin(comm);
  for (std::size_t id = 0; id < count; ++id) add_one(reducer, id, gradient);
}

TEST_P(Overlap, AReducerMayGoInTheMiddleOfAStep) {
  const auto given = gradients(3, 0);
  Cluster plain(3, layout_, GetParam());
  const auto want = meet(plain.reducers(), [&](Reducer& reducer, Communicator& comm) {
    return take_step(reducer, comm, given[comm::at(comm.rank())], in_order(layout_.count()));
  });
  for (std::size_t count = 0; count <= layout_.count(); ++count) {
    // Before the communicator, and after it.
    std::vector<std::unique_ptr<Reducer>> left(3);
    std::barrier everyone(3);
    std::vector<Floats> scratch = given;
    Cluster tried(3, layout_, GetParam());
    const auto got = meet(tried.reducers(), [&](Reducer& reducer, Communicator& comm) {
      const std::size_t rank = comm::at(comm.rank());
      Spec spec = parse_spec(GetParam());
      spec.settings["bucket_cap_mb"] = "0";
      {
        Reducer gone(layout_, spec);
        start_step(gone, comm, scratch[rank], count);
      }
      Outcome outcome = take_step(reducer, comm, given[rank], in_order(layout_.count()));
      left[rank] = std::make_unique<Reducer>(layout_, spec);
      start_step(*left[rank], comm, scratch[rank], count);
      everyone.arrive_and_wait();  // a rank that is gone would be missed
      return outcome;
    });
    left.clear();
    EXPECT_TRUE(scratch == given) << "gradients of a step that was not finished";
    expect_all_same(got, want);
  }
}

// All ranks drop the step at the same place, and take it again with the same communicator.
TEST_P(Overlap, AStepMayBeTakenAgain) {
  expect_no_difference(
      3, [&](Reducer& reducer, Communicator& comm, const Floats& gradient, std::mt19937& rng) {
        for (const std::size_t count : {layout_.count(), std::size_t{2}, std::size_t{0}}) {
          Floats scratch = gradient;
          start_step(reducer, comm, scratch, count);
          reducer.abandon();
          EXPECT_TRUE(same_bits(scratch, gradient));
        }
        reducer.abandon();
        return take_step(reducer, comm, gradient, any_order(layout_.count(), rng));
      });
}

// Each where it is, once it has sent something: they are in step nevertheless.
TEST_P(Overlap, RanksMayDropAStepAtDifferentPlaces) {
  expect_no_difference(
      3, [&](Reducer& reducer, Communicator& comm, const Floats& gradient, std::mt19937& rng) {
        for (int time = 0; time < 3; ++time) {
          Floats scratch = gradient;
          start_step(reducer, comm, scratch, 4 + comm::at(comm.rank() + time) % 3);
          reducer.abandon();
        }
        return take_step(reducer, comm, gradient, any_order(layout_.count(), rng));
      });
}

/// Damages every message of exchanges.
class Spoiling final : public comm::Decorator {
 public:
  using Decorator::Decorator;
  void post(int peer, const comm::Tag& tag, std::span<const std::byte> head,
            std::span<const std::byte> bytes) override {
    if (tag.exchange == 0xffffffff) return Decorator::post(peer, tag, head, bytes);
    Bytes message(head.begin(), head.end());
    message.insert(message.end(), bytes.begin(), bytes.end());
    message.back() ^= std::byte{1};
    Decorator::post(peer, tag, {}, message);
  }
};

// Whichever call finds it: progress, add or finish.
TEST_P(Overlap, AReducerThatThrewWorksInANewGroup) {
  Cluster plain(2, layout_, GetParam()), tried(2, layout_, GetParam());
  const Sequence order = in_order(layout_.count());
  for (int s = 0; s < 3; ++s) {
    const auto given = gradients(2, s);
    const auto want = meet(plain.reducers(), [&](Reducer& reducer, Communicator& comm) {
      return take_step(reducer, comm, given[comm::at(comm.rank())], order);
    });
    meet(tried.reducers(), [&](Reducer& reducer, Communicator& inner) {
      Spoiling comm(inner);
      Floats scratch = given[comm::at(comm.rank())];
      const State before = state_of(reducer);
      const bool alone = reducer.spec().settings.at("granularity") == "model";
      bool failed = false;
      try {
        start_step(reducer, comm, scratch, layout_.count());
        // Whoever is not at its first round finds a damaged message, or that the other left.
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        while (s != 1 && !alone && std::chrono::steady_clock::now() < until) reducer.progress();
        reducer.finish();
      } catch (const WireError&) {
        failed = true;
      } catch (const CommError&) {
        failed = true;
      }
      EXPECT_TRUE(failed);
      reducer.progress();  // there is no step to go on with
      EXPECT_THROW(reducer.finish(), std::invalid_argument);
      EXPECT_EQ(state_of(reducer), before);
      EXPECT_TRUE(same_bits(scratch, given[comm::at(comm.rank())]));
      return Outcome();
    });
    expect_all_same(meet(tried.reducers(),
                         [&](Reducer& reducer, Communicator& comm) {
                           return take_step(reducer, comm, given[comm::at(comm.rank())], order);
                         }),
                    want);
  }
}

}  // namespace
}  // namespace topreduce::laws
