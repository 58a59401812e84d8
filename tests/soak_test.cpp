// Some seconds of the soak, which mostly waits; `./run bench soak` goes on for as long as one says.

#include "soak.h"

namespace topreduce::laws {
namespace {

TEST(Soak, ThousandsOfSteps) {
#ifdef TOPREDUCE_SANITIZED
  constexpr std::uint64_t kSoakSteps = 300;
  constexpr std::chrono::milliseconds kSoakTimeout(500);
#else
  constexpr std::uint64_t kSoakSteps = 5'000;
  constexpr std::chrono::milliseconds kSoakTimeout(100);
#endif
  const SoakReport report = Soak(1, kSoakTimeout).run(kSoakSteps, {});
  std::printf("%s", to_string(report).c_str());
  EXPECT_EQ(report.steps, kSoakSteps);
  EXPECT_GT(report.committed, kSoakSteps / 2);
  EXPECT_EQ(report.faults.size(), faults::kFaultNames.size());
  EXPECT_GT(report.rebuilds, 0u);
  EXPECT_GT(report.late, 0u);
  EXPECT_GT(report.resumes, 0u);
#ifndef TOPREDUCE_SANITIZED
  EXPECT_TRUE(is_flat(report));
#endif
}

}  // namespace
}  // namespace topreduce::laws
