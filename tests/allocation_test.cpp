// A steady-state step of the core allocates nothing. Counted where all allocation passes: the
// global operator new and delete of this program, on threads that ask for it, or on all.

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <thread>

#include "cluster.h"
#include "topreduce/comm/self.h"
#include "topreduce/comm/thread.h"
#include "topreduce/reducer.h"

namespace {

thread_local bool counting = false;
std::atomic<bool> counting_everywhere = false;
std::atomic<int> allocations = 0;
thread_local int until_failure = 0;  // the allocation that fails, counted from the next; 0: none

void* allocate(std::size_t size, std::size_t alignment) noexcept {
  if (counting || counting_everywhere) ++allocations;
  // aligned_alloc wants a multiple of the alignment.
  return std::aligned_alloc(alignment, (size / alignment + 1) * alignment);
}

void* allocate_or_throw(std::size_t size, std::size_t alignment) {
  if (until_failure > 0 && --until_failure == 0) throw std::bad_alloc();
  if (void* memory = allocate(size, alignment)) return memory;
  throw std::bad_alloc();
}

void release(void* memory) noexcept {
  if ((counting || counting_everywhere) && memory != nullptr) ++allocations;
  std::free(memory);
}

constexpr std::size_t kPlain = __STDCPP_DEFAULT_NEW_ALIGNMENT__;

}  // namespace

// All other forms end up in these.
void* operator new(std::size_t size) {
  return allocate_or_throw(size, kPlain);
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate_or_throw(size, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return allocate(size, kPlain);
}
void operator delete(void* memory) noexcept {
  release(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  release(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  release(memory);
}

namespace topreduce::laws {
namespace {

constexpr int kWarmSteps = 40, kCountedSteps = 20;

/// In the warm steps everyone is late now and then: so all meet as many messages at once as there
/// can be.
void be_late(const Communicator& comm, int step, int place) {
  if (step >= kWarmSteps || comm.size() == 1) return;
  if (step % comm.size() != comm.rank() || step / comm.size() % 3 != place) return;
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

/// Gradients of a model by rank and step, the same for all rows: to make them takes longer than
/// steps.
class Gradients {
 public:
  explicit Gradients(const Layout& layout) {
    for (int r = 0; r < 3; ++r) {
      for (int s = 0; s < kWarmSteps + kCountedSteps; ++s) {
        all_.push_back(heavy_tailed(r, s, layout));
      }
    }
  }
  const Floats& of(int rank, int step) const {
    return all_[static_cast<std::size_t>(rank * (kWarmSteps + kCountedSteps) + step)];
  }

 private:
  std::vector<Floats> all_;
};

/// Runs steps on one rank, `counting` from begin to finish of the last ones. Parameters come in
/// another order in every step. Each byte above `free_bytes` is told to have been waited for.
void run_steps(Reducer& reducer, Communicator& comm, const Gradients& gradients,
               double free_bytes = 0) {
  const Layout& layout = reducer.layout();
  Cut cut = per_parameter(layout);
  for (int s = 0; s < kWarmSteps + kCountedSteps; ++s) {
    Floats gradient = gradients.of(comm.rank(), s);
    std::ranges::shuffle(cut, std::mt19937(static_cast<unsigned>(10 * s + comm.rank())));
    counting = s >= kWarmSteps;
    be_late(comm, s, 0);
    reducer.begin(comm);
    be_late(comm, s, 1);
    for (const auto& ids : cut) {
      const Parameter& parameter = layout[ids[0]];
      reducer.add(ids, std::span(gradient).subspan(parameter.offset, parameter.size));
    }
    be_late(comm, s, 2);
    reducer.finish();
    if (free_bytes > 0) {
      const auto sent = static_cast<double>(reducer.stats().bytes_sent);
      reducer.timed(1000, 10 + std::max(0.0, sent - free_bytes));
    }
    counting = false;
  }
}

class Allocation : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Rows, Allocation, testing::ValuesIn(fewer_rows()),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(Allocation, NoneInASteadyStep) {
  static const Layout layout(
      {{"a.weight", {5000}}, {"a.bias", {7}}, {"none", {0}}, {"b", {60, 50}}});
  static const Gradients gradients(layout);
  allocations = 0;
  Reducer reducer(layout, GetParam());
  comm::Self self;
  run_steps(reducer, self, gradients);
  EXPECT_EQ(allocations, 0) << "on one rank";

  run_ranks(2, [&](Communicator& comm) {
    Reducer mine(layout, GetParam());
    run_steps(mine, comm, gradients);
  });
  EXPECT_LE(allocations, kCountedSteps / 2) << "on two ranks: more may come at once than ever";
}

// Each parameter is an exchange of its own; which of them meet depends on the threads.
TEST_P(Allocation, FewWhereExchangesOverlap) {
  static const Layout layout({{"a.weight", {5000}},
                              {"a.bias", {7}},
                              {"none", {0}},
                              {"b", {60, 50}},
                              {"b.bias", {60}},
                              {"c", {30, 90}}});
  static const Gradients gradients(layout);
  Spec spec = parse_spec(GetParam());
  spec.settings["bucket_cap_mb"] = "0";
  for (const int ranks : {2, 3}) {
    allocations = 0;
    run_ranks(ranks, [&](Communicator& comm) {
      Reducer mine(layout, spec);
      run_steps(mine, comm, gradients);
    });
    // By chance more may meet than ever before, and a buffer grows.
    EXPECT_LE(allocations, 2 * ranks * kCountedSteps) << "on " << ranks << " ranks";
  }
}

TEST(Allocation, NoneWhereTheDensityWasFound) {
  const Layout layout({{"a.weight", {5000}}, {"a.bias", {7}}, {"b", {60, 50}}});
  const Gradients gradients(layout);
  for (const char* row :
       {"auto", "ok_topk:density=auto", "arc_topk:density=auto,min_density=0.1"}) {
    SCOPED_TRACE(row);
    allocations = 0;
    run_ranks(2, [&](Communicator& comm) {
      Reducer reducer(layout, row);
      run_steps(reducer, comm, gradients, 1500);
      EXPECT_EQ(reducer.reason().rfind("settled", 0), 0U)
          << row << ": " << reducer.reason() << "; " << reducer.choices();
    });
    EXPECT_LE(allocations, kCountedSteps / 2) << "more may come at once than ever";
  }
}

TEST(Allocation, NoneWhereGradientsAreLent) {
  const Layout layout({{"a", {20'000}}, {"b", {60, 50}}});
  const Gradients gradients(layout);
  for (const char* row : {"topk:density=0.05", "ok_topk:density=0.05"}) {
    Reducer reducer(layout, row);
    comm::Self self;
    const std::size_t everything[] = {0, 1};
    allocations = 0;
    for (int s = 0; s < kWarmSteps + kCountedSteps; ++s) {
      Floats lent = gradients.of(0, s);
      counting = s >= kWarmSteps;
      reducer.begin(self);
      reducer.lend(everything, lent);
      reducer.finish();
      counting = false;
    }
    EXPECT_EQ(allocations, 0) << row;
  }
}

// Wherever memory runs out: also when some of a bucket's gradients are in the memory already.
TEST(Allocation, AFailureLeavesNoTraceOfLentGradients) {
  const Layout layout({{"a", {40'000}}, {"b", {200, 100}}});
  const std::size_t everything[] = {0, 1};
  comm::Self self;
  const auto step = [&](Reducer& reducer, Floats gradient, int failing) {
    reducer.begin(self);
    until_failure = failing;
    try {
      reducer.lend(everything, gradient);
      reducer.finish();
    } catch (const std::bad_alloc&) {
      until_failure = 0;
      return false;
    }
    until_failure = 0;
    return true;
  };
  bool failed = true;
  int failures = 0;
  for (int failing = 1; failed; ++failing) {
    SCOPED_TRACE(failing);
    Reducer reducer(layout, "topk:density=0.02"), other(layout, "topk:density=0.02");
    Floats large = heavy_tailed(0, 9, layout);
    for (float& value : large) value *= 3;  // more of it is chosen: buffers grow
    for (int s = 0; s < 2; ++s) {
      step(reducer, heavy_tailed(0, s, layout), 0);
      step(other, heavy_tailed(0, s, layout), 0);
    }
    failed = !step(reducer, large, failing);
    failures += failed ? 1 : 0;
    if (!failed) step(other, large, 0);
    ASSERT_TRUE(same_bits(reducer.owed(), other.owed()));
    step(reducer, heavy_tailed(0, 10, layout), 0);
    step(other, heavy_tailed(0, 10, layout), 0);
    ASSERT_TRUE(same_bits(reducer.owed(), other.owed()));
  }
  EXPECT_GE(failures, 3);
}

TEST(Allocation, NoneWithSeveralThreads) {
  const std::size_t grain = std::exchange(Chunks::grain, 512);
  const Layout layout({{"a", {20'000}}, {"b", {60, 50}}});
  for (const char* row :
       {"topk:density=0.05,threads=3", "ok_topk:density=0.05,threads=3,granularity=model",
        "dense:values=bf16,threads=3", "arc_topk:density=0.2,threads=3"}) {
    Reducer reducer(layout, row);
    comm::Self self;
    std::vector<Floats> gradients;
    for (int s = 0; s < kWarmSteps + kCountedSteps; ++s) {
      gradients.push_back(heavy_tailed(0, s, layout));
    }
    for (int s = 0; s < kWarmSteps + kCountedSteps; ++s) {
      allocations = 0;
      counting_everywhere = s >= kWarmSteps;
      reducer.average(self, gradients[static_cast<std::size_t>(s)]);
      counting_everywhere = false;
      EXPECT_EQ(allocations, 0) << row << ", step " << s;
    }
  }
  Chunks::grain = grain;
}

/// A step of messages to everyone, some in a frame together; `late`: between sending and receiving,
/// so that messages of the next step come early.
void exchange_messages(Communicator& comm, std::uint64_t step, bool late) {
  using comm::Tag;
  static constexpr std::size_t kLengths[] = {1, 3000, 100'000};
  static const std::vector<std::byte> bytes(kLengths[2]);
  comm.enter({comm::Place::Kind::step, step});
  for (std::uint32_t round = 0; round < 3; ++round) {
    for (int peer = 0; peer < comm.size(); ++peer) {
      if (peer == comm.rank()) continue;
      comm.expect(Tag{0, round}, peer);
      comm.post(peer, Tag{0, round}, {}, std::span(bytes).first(kLengths[round]));
    }
    if (round == 1) comm.flush();
  }
  comm.flush();
  if (late) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  for (std::uint32_t round = 0; round < 3; ++round) {
    comm.wait(Tag{0, round}, static_cast<std::size_t>(comm.size() - 1));
    comm.release(Tag{0, round});
  }
}

TEST(Allocation, NoneForMessagesAsBefore) {
  allocations = 0;
  run_ranks(3, [](Communicator& comm) {
    for (std::uint64_t step = 0; step < 200; ++step) {
      counting = step >= 60;
      // At first everyone is late now and then, and meets as many early messages as there can be.
      exchange_messages(comm, step, !counting && static_cast<int>(step % 3) == comm.rank());
    }
    counting = false;
  });
  EXPECT_LE(allocations, 6) << "by chance more may meet than before";
}

TEST(Allocation, IsCounted) {
  allocations = 0;
  counting = true;
  std::vector<float> grows(3);
  grows.resize(1000);
  counting = false;
  EXPECT_EQ(allocations, 3);  // two and one that was given back
}

}  // namespace
}  // namespace topreduce::laws
