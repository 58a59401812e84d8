// The pool, and the law that it must not change: results are the same bits with any number of
// threads, in rows of laws.h.

#include "topreduce/threads.h"

#include <cstdlib>
#include <stdexcept>
#include <sys/resource.h>
#include <utility>

#include "cluster.h"

namespace topreduce::laws {
namespace {

const std::vector<std::size_t> kThreadCounts =
    kSanitized ? std::vector<std::size_t>{3} : std::vector<std::size_t>{2, 3, 5};

/// Cuts small models too, as long as it lives.
class SmallGrain {
 public:
  explicit SmallGrain(std::size_t grain) : before_(std::exchange(Chunks::grain, grain)) {}
  ~SmallGrain() { Chunks::grain = before_; }

 private:
  std::size_t before_;
};

// ---- the pool ----------------------------------------------------------------------------------

TEST(Threads, DoEveryPartOnce) {
  for (const std::size_t count : {1u, 2u, 3u, 5u}) {
    Threads threads(count);
    EXPECT_EQ(threads.count(), count);
    for (const std::size_t parts : {0u, 1u, 2u, 7u, 64u}) {
      std::vector<int> done(parts);
      for (int time = 0; time < 50; ++time) {
        threads.for_each(parts, [&](std::size_t part) { ++done[part]; });
      }
      EXPECT_EQ(done, std::vector<int>(parts, 50)) << count << " threads";
    }
  }
  EXPECT_GE(Threads(0).count(), 1u);
}

TEST(Threads, PassOnWhatAPartThrows) {
  Threads threads(3);
  const auto fail = [&](std::size_t part) {
    if (part == 5) throw std::runtime_error("part 5");
  };
  EXPECT_THROW(threads.for_each(8, fail), std::runtime_error);
  std::atomic<int> done = 0;
  threads.for_each(8, [&](std::size_t) { ++done; });
  EXPECT_EQ(done, 8);
}

// Where threads cannot be had, it says so; those that it got are gone.
TEST(Threads, SayHowManyThereAre) {
  if (kSanitized) GTEST_SKIP() << "its own memory has no room under such a limit";
  const auto try_too_many = [] {
    const rlimit little{std::size_t{1} << 30,
                        std::size_t{1} << 30};  // bytes: stacks take 8 MB each
    setrlimit(RLIMIT_AS, &little);
    try {
      Threads threads(1024);
    } catch (const std::invalid_argument& error) {
      const std::string text = error.what();
      std::_Exit(text.find("of 1024 threads") != std::string::npos ? 7 : 8);
    }
    std::_Exit(9);
  };
  EXPECT_EXIT(try_too_many(), testing::ExitedWithCode(7), "");
}

TEST(Chunks, CoverEverythingInOrder) {
  for (const std::size_t size : {0u, 1u, 63u, 64u, 65u, 1000u, 300'000u, 26'000'000u}) {
    for (const std::size_t whole : {64u, 256u}) {
      const Chunks chunks(size, 16, whole);
      ASSERT_LE(chunks.count(), Chunks::kMost);
      std::size_t end = 0;
      for (std::size_t s = 0; s < chunks.count(); ++s) {
        EXPECT_EQ(chunks.begin(s), end);
        EXPECT_EQ(end % whole, 0u);
        EXPECT_GT(chunks.length(s), 0u);
        end += chunks.length(s);
      }
      EXPECT_EQ(end, size);
    }
  }
}

// ---- the law -----------------------------------------------------------------------------------

void expect_same(const Outcome& got, const Outcome& want) {
  EXPECT_TRUE(same_bits(got.gradient, want.gradient));
  EXPECT_TRUE(same_bits(got.owed, want.owed));
  EXPECT_EQ(got.state, want.state);
  EXPECT_EQ(got.traffic.bytes_sent, want.traffic.bytes_sent);
  EXPECT_EQ(got.stats.kept_energy, want.stats.kept_energy);
  EXPECT_EQ(got.stats.owed_norm, want.stats.owed_norm);
}

/// Ranks with 1, and with other numbers of threads, even one each, end every step alike.
void expect_no_difference(const Layout& layout, const std::string& row, int steps) {
  const auto spec = [&](std::size_t threads) {
    Spec it = parse_spec(row);
    it.settings["threads"] = std::to_string(threads);
    return it;
  };
  Cluster one(2, layout, spec(1));
  std::vector<Cluster> many;
  for (const std::size_t count : kThreadCounts) many.emplace_back(2, layout, spec(count));
  many.back()[0].configure({"", {{"threads", "2"}}});  // each rank as it likes
  for (int s = 0; s < steps; ++s) {
    const auto gradients =
        gradients_of(2, s, [&](int rank, int step) { return heavy_tailed(rank, step, layout); });
    const auto want = one.step(gradients, three_buckets(layout));
    for (Cluster& cluster : many) {
      const auto got = cluster.step(gradients, three_buckets(layout));
      for (std::size_t r = 0; r < 2; ++r) {
        SCOPED_TRACE(to_string(cluster[static_cast<int>(r)].spec()) + ", step " +
                     std::to_string(s));
        expect_same(got[r], want[r]);
      }
    }
  }
}

class ThreadLaw : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Rows, ThreadLaw, testing::ValuesIn(fewer_rows()),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(ThreadLaw, ResultsDoNotDependOnTheirNumber) {
  const SmallGrain grain(64);
  expect_no_difference(small_model(), GetParam(), 4);
}

// More candidates than are kept: every thread drops some of its own.
TEST(ThreadLaw, HoldsWhereCandidatesAreDropped) {
  const SmallGrain grain(4096);
  const Layout layout({{"long", {150'000}}, {"short", {100}}, {"other", {3000, 17}}});
  for (const char* row : {"topk:density=0.01", "ok_topk:density=0.01,granularity=model",
                          "gaussiank:density=0.01,granularity=model"}) {
    expect_no_difference(layout, row, 2);
  }
}

}  // namespace
}  // namespace topreduce::laws
