// Every fault in every phase of every method; in sanitizers of some rows. Whatever happens to a
// message, a rank has either the step, bit for bit as it should be, or a typed error that says
// where, and what it had before. Ranks may differ only if the very last message, a vote, was hit.

#include "faults.h"

#include <atomic>
#include <barrier>
#include <cstdio>
#include <mutex>
#include <random>
#include <thread>

#include "cluster.h"

namespace topreduce::laws {
namespace {

using comm::Phase;
using faults::Fault;
using faults::Faulty;
using faults::Incident;
using faults::Killed;
using faults::Target;
using namespace std::chrono_literals;

const auto kTimeout = kSanitized ? 800ms : 500ms;
const int kLiesApart = kSanitized ? 7 : 1;
// Clusters that share the machine, and those of which most just wait.
constexpr std::size_t kAtOnce = 24, kAtOnceWaiting = 75;

/// A sanitizer sees each kind of fault in some rows; without one all of rows() have it, or more.
std::vector<const char*> rows_with_faults() {
  if (!kSanitized && !kLong) return rows();
  std::vector<const char*> chosen;
  const std::size_t apart = kThreadsSanitized || !kLong ? 11 : kSanitized ? 7 : 1;
  for (std::size_t i = 0; i < std::size(kRows); i += apart) chosen.push_back(kRows[i]);
  return chosen;
}

constexpr std::size_t kUnused[] = {1};
constexpr std::array<const char*, 3> kPhaseNames = {"agreement", "exchange", "vote"};

/// What all cases of a suite came to.
struct Tally {
  std::atomic<int> cases = 0, struck = 0, errors = 0, committed = 0, mixed = 0;
  std::mutex mutex;
  double slowest = 0;

  void note(double seconds) {
    const std::lock_guard lock(mutex);
    slowest = std::max(slowest, seconds);
  }
  void print(const char* name) {
    std::printf(
        "%s: %d cases, %d faults struck, %d errors of survivors, %d steps committed, %d "
        "cases with both; all knew after %.3f s at most, time-out %.3f s\n",
        name, cases.load(), struck.load(), errors.load(), committed.load(), mixed.load(), slowest,
        std::chrono::duration<double>(kTimeout).count());
    // On a busy machine a rank may be silent for too long by itself, before its fault.
    EXPECT_GE(100 * struck, 95 * cases);
    EXPECT_GT(cases, 10);
    testing::Test::RecordProperty("cases", cases);
    testing::Test::RecordProperty("struck", struck);
    testing::Test::RecordProperty("slowest_ms", static_cast<int>(1e3 * slowest));
  }
};

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

/// Whether an error says who, when and where.
testing::AssertionResult names_the_place(const std::string& error, int rank, std::uint64_t step) {
  const char* const phases[] = {"bucket of parameter ", "the vote", "the agreement",
                                "the order of buckets", "an exchange by the transport"};
  const bool phase =
      std::ranges::any_of(phases, [&](const char* each) { return has(error, each); });
  if (phase && has(error, "rank " + std::to_string(rank)) &&
      has(error, "step " + std::to_string(step))) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "rank " << rank << ", step " << step << ": " << error;
}

/// A run that faults happen to.
class Victims {
 public:
  Victims(int ranks, const char* row, Handing handing, Tally& tally)
      : ranks_(ranks), row_(row), handing_(handing), tally_(&tally) {
    start();
  }
  /// From now on rank 0 leaves a parameter unused, so that votes have a second round.
  void leave_one_unused() {
    participation_.resize(static_cast<std::size_t>(ranks_));
    participation_[0].unused = kUnused;
  }

  /// A step without faults.
  void go_on() {
    for (const Outcome& outcome : cluster_->step(gradients(), cut_, 1, {}, participation_))
      EXPECT_EQ(outcome.error, "");
    ++step_;
  }

  /// What the next step should come to, and how many messages `target` stands for; nothing changes.
  void look_ahead(Target target) {
    target.skip = ~std::uint64_t{0};
    Incident none(ranks_, Fault::delay, target);
    before_ = states();
    go_back();
    after_ =
        cluster_->step(gradients(), cut_, 1, wrap(none, std::chrono::hours(1)), participation_);
    for (const Outcome& outcome : after_) EXPECT_EQ(outcome.error, "");
    messages_ = none.matches();
    go_back();
  }
  std::uint64_t messages() const { return messages_; }

  /// The next step, with a fault; then all is as before it.
  void suffer(Fault fault, const Target& target, std::uint32_t seed) {
    SCOPED_TRACE(std::string(faults::kFaultNames[static_cast<std::size_t>(fault)]) + " in the " +
                 kPhaseNames[static_cast<std::size_t>(target.phase)] + ", message " +
                 std::to_string(target.skip) + " of rank " + std::to_string(target.rank) + " of " +
                 std::to_string(ranks_) + ", seed " + std::to_string(seed) + ", " +
                 to_string((*cluster_)[0].spec()));
    Incident incident(ranks_, fault, target, seed);
    const auto had = gradients();
    const auto outcomes = cluster_->step(had, cut_, 1, wrap(incident), participation_);
    bool committed = false, failed = false, before_the_vote = false;
    for (std::size_t r = 0; r < outcomes.size(); ++r) {
      const Outcome& outcome = outcomes[r];
      if (!outcome.failed()) {
        committed = true;
        ++tally_->committed;
        EXPECT_TRUE(same_bits(outcome.gradient, after_[r].gradient)) << "rank " << r;
        EXPECT_EQ(outcome.state, after_[r].state) << "rank " << r;
        continue;
      }
      EXPECT_EQ(outcome.state, before_[r]) << "rank " << r;
      EXPECT_TRUE(handing_ != Handing::add || same_bits(outcome.gradient, had[r]));
      if (outcome.error == Killed::kText) continue;
      failed = true;
      ++tally_->errors;
      EXPECT_TRUE(names_the_place(outcome.error, static_cast<int>(r), target.step));
      before_the_vote = before_the_vote || !has(outcome.error, "the vote");
    }
    EXPECT_FALSE(committed && before_the_vote) << "a rank has what others never had";
    ++tally_->cases;
    tally_->struck += incident.struck() ? 1 : 0;
    tally_->mixed += committed && failed ? 1 : 0;
    tally_->note(incident.seconds());
    go_back();
  }

 private:
  static Wrap wrap(Incident& incident, std::chrono::milliseconds timeout = kTimeout) {
    return [&incident, timeout](Communicator& comm) {
      comm.set_timeout(timeout);
      return std::make_unique<Faulty>(comm, incident);
    };
  }
  std::vector<Floats> gradients() {
    return gradients_of(ranks_, step_, [&](int r, int s) { return heavy_tailed(r, s, layout_); });
  }
  std::vector<State> states() {
    std::vector<State> all;
    for (Reducer& reducer : cluster_->reducers()) all.push_back(state_of(reducer));
    return all;
  }
  void start() {
    cluster_ = std::make_unique<Cluster>(ranks_, layout_, row_);
    cluster_->hand_over_by(handing_);
  }
  // Ranks that have agreed do not do it again. As long as that matters, another run takes over;
  // then they do it in every step, as they do after one that failed, so that all have the same
  // messages.
  void go_back() {
    if (step_ < 2) {
      start();
      for (const int now = std::exchange(step_, 0); step_ < now;) go_on();
      return;
    }
    for (int r = 0; r < ranks_; ++r) {
      Loader loader(before_[static_cast<std::size_t>(r)]);
      (*cluster_)[r].visit(loader);
      (*cluster_)[r].set_mode(Reducer::Mode::compress);
    }
  }

  const Layout layout_ = small_model();
  const Cut cut_ = three_buckets(layout_);
  int ranks_;
  const char* row_;
  Handing handing_;
  std::unique_ptr<Cluster> cluster_;
  int step_ = 0;
  Tally* tally_;
  std::vector<Participation> participation_;
  std::vector<State> before_;
  std::vector<Outcome> after_;
  std::uint64_t messages_ = 0;
};

/// Calls body(i) for all i below `count`, up to `at_once` at a time.
template <class Body>
void for_each_at_once(std::size_t count, std::size_t at_once, Body&& body) {
  std::atomic<std::size_t> next = 0;
  std::vector<std::jthread> threads;
  for (std::size_t t = 0; t < std::min(at_once, count); ++t) {
    threads.emplace_back([&] {
      for (std::size_t i; (i = next++) < count;) body(i);
    });
  }
}

class Faults : public testing::TestWithParam<Fault> {};

INSTANTIATE_TEST_SUITE_P(Of, Faults,
                         testing::Values(Fault::kill, Fault::stop, Fault::delay, Fault::drop,
                                         Fault::flip, Fault::cut, Fault::duplicate, Fault::reorder),
                         [](const auto& test) {
                           return faults::kFaultNames[static_cast<std::size_t>(test.param)];
                         });

// At the first, the last and some other message of each phase: comparing settings in the first
// step, the order of buckets in the second, exchanges, and the vote.
TEST_P(Faults, InEveryPhaseOfEveryMethod) {
  Tally tally;
  const bool waits = GetParam() == Fault::stop || GetParam() == Fault::reorder;
  const bool many = waits || GetParam() == Fault::cut;
  const auto rows = rows_with_faults();
  for_each_at_once(rows.size(), many ? kAtOnceWaiting : kAtOnce, [&](std::size_t i) {
    constexpr int kRanks[] = {2, 3, 5};
    constexpr Handing kHandings[] = {Handing::add, Handing::lend, Handing::lend_and_deliver};
    const int ranks = kRanks[i % 3];
    Victims run(ranks, rows[i], kHandings[i / 3 % 3], tally);
    if (i % 4 == 1) run.leave_one_unused();
    std::mt19937 random(static_cast<unsigned>(i));
    for (std::uint64_t step = 0; step < 4; ++step) {
      for (const Phase phase : {Phase::agreement, Phase::exchange, Phase::vote}) {
        // Exchanges and the vote are alike in the first steps and later.
        if ((phase == Phase::agreement) != (step < 2)) continue;
        Target target{.rank = static_cast<int>(random()) & 1, .step = step, .phase = phase};
        if (step == 3) target.rank = ranks - 1;
        run.look_ahead(target);
        if (run.messages() == 0) continue;  // step 1 has no order to agree on
        const std::uint64_t last = run.messages() - 1;
        for (const std::uint64_t skip : {std::uint64_t{0}, random() % (last + 1), last}) {
          // Each takes a time-out.
          if (waits && skip != last && (kSanitized || (i + skip) % 3 != 0)) continue;
          target.skip = skip;
          run.suffer(GetParam(), target, static_cast<std::uint32_t>(random()));
        }
      }
      run.go_on();
    }
  });
  tally.print(faults::kFaultNames[static_cast<std::size_t>(GetParam())]);
}

// Beyond 8 ranks the vote has two rounds, and not everyone hears from everyone.
TEST(FaultCases, InBothRoundsOfALongVote) {
  Tally tally;
  for_each_at_once(24, kAtOnce, [&](std::size_t i) {
    Victims run(9, i % 2 == 0 ? "topk:density=0.1" : "dense", Handing::add, tally);
    for (int s = 0; s < 2; ++s) run.go_on();
    Target target{.rank = static_cast<int>(i % 3 * 4),
                  .step = 2,
                  .phase = Phase::vote,
                  .round = static_cast<std::uint32_t>(i / 12)};
    run.look_ahead(target);
    EXPECT_GT(run.messages(), 0u);
    for (target.skip = 0; target.skip < run.messages(); target.skip += 3) {
      run.suffer(i / 6 % 2 == 0 ? Fault::kill : Fault::stop, target, 0);
    }
  });
  tally.print("9 ranks");
}

TEST(FaultCases, InTheTransportsOwnAllReduce) {
  constexpr const char* kNatives[] = {
      "dense:reduce=native", "dense:reduce=native,granularity=model",
      "randk:density=0.1,values=fp32,reduce=native",
      "arc_topk:density=0.2,values=fp32,reduce=native,granularity=model"};
  Tally tally;
  for_each_at_once(4 * std::size(kNatives), kAtOnce, [&](std::size_t i) {
    Victims run(3, kNatives[i / 4], Handing::add, tally);
    for (int s = 0; s < 2; ++s) run.go_on();
    const int rank = i / 2 % 2 == 0 ? 0 : 2;
    Target target{.rank = rank, .step = 2, .phase = Phase::exchange, .peer = rank};
    run.look_ahead(target);
    EXPECT_GT(run.messages(), 0u);
    for (const std::uint64_t skip : {std::uint64_t{0}, run.messages() - 1}) {
      target.skip = skip;
      run.suffer(i % 2 == 0 ? Fault::kill : Fault::stop, target, 0);
    }
  });
  tally.print("native");
}

// A rank drops a step before any exchange and stays: nobody was told, and it may come back.
TEST(FaultCases, OneDropsAStepAndSaysNothing) {
  constexpr const char* kSome[] = {"topk:density=0.1", "topk:density=0.1,granularity=model",
                                   "dense"};
  const Layout layout = small_model();
  for_each_at_once(std::size(kSome), kAtOnce, [&](std::size_t i) {
    std::barrier all_have_given_up(3);
    run_ranks(3, [&](Communicator& comm) {
      Reducer reducer(layout, kSome[i]);
      const auto take_step = [&](int step) {
        Floats gradient = heavy_tailed(comm.rank(), step, layout);
        reducer.average(comm, gradient);
      };
      take_step(0);
      take_step(1);
      comm.set_timeout(kTimeout);
      const State before = state_of(reducer);
      if (comm.rank() == 1) {
        reducer.begin(comm);
        const std::size_t none[] = {99};
        EXPECT_THROW(reducer.add(none, {}), std::invalid_argument);
      } else {
        try {
          take_step(2);
          ADD_FAILURE() << "no error";
        } catch (const CommError& error) {
          EXPECT_TRUE(names_the_place(error.what(), comm.rank(), 2));
          EXPECT_TRUE(has(error.what(), " is silent: nothing came of it for ")) << error.what();
        }
      }
      EXPECT_EQ(state_of(reducer), before);
      all_have_given_up.arrive_and_wait();
    });
  });
}

// ---- messages that are valid, and lie ----------------------------------------------------------

struct Sent {
  comm::Place place;
  comm::Tag tag;
  int peer;
  Bytes bytes;
};

/// Keeps what rank 1 sends, or sends what was kept in place of one message.
class Liar final : public comm::Decorator {
 public:
  Liar(Communicator& inner, std::vector<Sent>& kept) : Decorator(inner), kept_(&kept) {}
  Liar(Communicator& inner, const Sent& from, const Bytes& lie)
      : Decorator(inner), from_(&from), lie_(&lie) {}

  void post(int peer, const comm::Tag& tag, std::span<const std::byte> head,
            std::span<const std::byte> bytes) override {
    if (rank() == 1 && kept_ != nullptr) {
      Bytes all(head.begin(), head.end());
      append(all, bytes);
      kept_->push_back({mailbox().place(), tag, peer, all});
    }
    const bool lies = rank() == 1 && from_ != nullptr && tag == from_->tag && peer == from_->peer &&
                      mailbox().place() == from_->place;
    if (lies) return Decorator::post(peer, tag, {}, *lie_);
    Decorator::post(peer, tag, head, bytes);
  }

 private:
  std::vector<Sent>* kept_ = nullptr;
  const Sent* from_ = nullptr;
  const Bytes* lie_ = nullptr;
};

class Lies : public testing::TestWithParam<const char*> {
 protected:
  struct Run {
    Cluster cluster;
    std::vector<Sent> sent{};
  };
  /// Steps 0 to 2 of a run.
  Run play(Spec spec) {
    Run run{Cluster(2, layout_, std::move(spec))};
    for (int s = 0; s < 3; ++s) {
      const auto outcomes = step(run.cluster, s, [&](Communicator& comm) {
        return std::make_unique<Liar>(comm, run.sent);
      });
      for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.error, "");
    }
    return run;
  }
  std::vector<Outcome> step(Cluster& cluster, int s, const Wrap& wrap) {
    return cluster.step(
        gradients_of(2, s, [&](int r, int t) { return heavy_tailed(r, t, layout_); }), cut_, 1,
        wrap, participation_);
  }
  const Layout layout_ = small_model();
  const Cut cut_ = three_buckets(layout_);
  const std::vector<Participation> participation_{Participation{.unused = kUnused},
                                                  Participation()};
};

INSTANTIATE_TEST_SUITE_P(Rows, Lies,
                         testing::Values("topk:density=0.1", "dense", "ok_topk:density=0.1",
                                         "arc_topk:density=0.2", "gtopk:density=0.1",
                                         "randk:density=0.1", "topk_dsa:density=0.1"),
                         [](const auto& test) { return name_of(test.param); });

// In place of each message of a step one of another step, of other parameters, of another run, or
// of another round: sealed by someone who knows how, whole and undamaged.
TEST_P(Lies, AreRefused) {
  Spec spec = parse_spec(GetParam()), other = spec;
  other.settings["seed"] = "7";
  Run run = play(spec);
  const Run elsewhere = play(other);
  std::vector<Sent> coming;  // what step 3 sends
  step(run.cluster, 3, [&](Communicator& comm) { return std::make_unique<Liar>(comm, coming); });
  int lies = 0;
  const auto lie = [&](const Sent& truth, const Sent& told) {
    if (told.bytes == truth.bytes || ++lies % kLiesApart != 0) return;
    Cluster deceived = play(spec).cluster;
    const State before = state_of(deceived[0]);
    const auto outcomes = step(deceived, 3, [&](Communicator& comm) {
      comm.set_timeout(kTimeout);
      return std::make_unique<Liar>(comm, truth, told.bytes);
    });
    EXPECT_EQ(outcomes[0].state, before);
    EXPECT_TRUE(names_the_place(outcomes[0].error, 0, 3));
    EXPECT_TRUE(has(outcomes[0].error, "rank 1")) << outcomes[0].error;
  };
  for (const Sent& truth : coming) {
    for (const Sent& told : run.sent) {
      if (told.tag == truth.tag && told.place.kind == truth.place.kind) lie(truth, told);
    }
    for (const Sent& told : elsewhere.sent) {
      if (told.tag == truth.tag && told.place.step == 2) lie(truth, told);
    }
    for (const Sent& told : coming) {
      if (told.tag != truth.tag) lie(truth, told);
    }
  }
  std::printf("%d lies\n", lies);
  EXPECT_GT(lies, 10);
}

}  // namespace
}  // namespace topreduce::laws
