// The caller's floating-point mode decides nothing: with subnormal numbers flushed to zero, or
// another rounding, results are the same bits, and the mode is as it was afterwards.

#include "topreduce/floating.h"

#include <cfenv>

#include "cluster.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace topreduce::laws {
namespace {

#if defined(__x86_64__)
constexpr unsigned kFlushToZero = 0x8040;  // FTZ and DAZ of MXCSR
constexpr unsigned kUpwards = 0x4000;
constexpr unsigned kFlags = 0x3f;

class Mode : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Rows, Mode, testing::ValuesIn(rows()),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(Mode, OfTheCallerChangesNothing) {
  const Layout layout = small_model();
  const Cut cut = three_buckets(layout);
  Spec spec = parse_spec(GetParam());
  spec.settings["threads"] = "2";
  Cluster usual(2, layout, GetParam());
  // Threads inherit the mode of the one that makes them.
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | kFlushToZero);
  Cluster other(2, layout, spec);
  _mm_setcsr(before);
  for (int s = 0; s < 4; ++s) {
    auto gradients =
        gradients_of(2, s, [&](int rank, int at) { return heavy_tailed(rank, at, layout); });
    // Few entries that matter, some that are subnormal, and many zeros.
    for (Floats& gradient : gradients) {
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        if (i % 9 != 0) gradient[i] = i % 9 == 1 ? 1e-40f : 0;
      }
    }
    const auto want = usual.step(gradients, cut);
    const unsigned mode = s % 2 == 0 ? kFlushToZero : kUpwards;
    const auto got = meet(other.reducers(), [&](Reducer& reducer, Communicator& comm) {
      const auto rank = static_cast<std::size_t>(comm.rank());
      const bool lends = s >= 2;
      Floats lent = gradients[rank];
      Outcome outcome;
      outcome.gradient = lends ? Floats(lent.size()) : lent;
      const unsigned own = _mm_getcsr();
      _mm_setcsr(own | mode);
      reducer.begin(comm);
      std::size_t start = 0;
      for (const auto& bucket : cut) {
        std::size_t size = 0;
        for (const std::size_t id : bucket) size += layout[id].size;
        const auto mine = std::span(outcome.gradient).subspan(start, size);
        lends ? reducer.lend(bucket, std::span(lent).subspan(start, size))
              : reducer.add(bucket, mine);
        if (lends) {
          reducer.progress();
          reducer.deliver_to(bucket, mine);
        }
        start += size;
      }
      outcome.stats = reducer.finish();
      EXPECT_EQ(_mm_getcsr() & ~kFlags, (own | mode) & ~kFlags);
      _mm_setcsr(own);
      outcome.state = state_of(reducer);
      return outcome;
    });
    for (std::size_t r = 0; r < got.size(); ++r) {
      ASSERT_EQ(got[r].stats.selected, want[r].stats.selected) << "step " << s;
      ASSERT_TRUE(same_bits(got[r].gradient, want[r].gradient)) << "step " << s;
      ASSERT_EQ(got[r].state, want[r].state) << "step " << s;
    }
  }
}
#endif

TEST(Floating, MagnitudesThatNoFloatHoldsBecomeTheLargest) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  EXPECT_EQ(to_magnitude(1e300), kLargest);
  EXPECT_EQ(to_magnitude(-1), 0);
  EXPECT_EQ(to_magnitude(0.5), 0.5f);
}

}  // namespace
}  // namespace topreduce::laws
