// Some seconds of the soak, which mostly waits; `./run bench soak` goes on for as long as one says.

#include "soak.h"

namespace topreduce::laws {
namespace {

TEST(Soak, ThousandsOfSteps) {
  const std::uint64_t steps = kSanitized ? 300 : kLong ? 5'000 : 1'500;
  const std::chrono::milliseconds timeout(kSanitized ? 500 : 100);
  const SoakReport report = Soak(1, timeout).run(steps, {});
  std::printf("%s", to_string(report).c_str());
  EXPECT_EQ(report.steps, steps);
  EXPECT_GT(report.committed, steps / 2);
  EXPECT_EQ(report.faults.size(), faults::kFaultNames.size());
  EXPECT_GT(report.rebuilds, 0u);
  EXPECT_GT(report.late, 0u);
  EXPECT_GT(report.resumes, 0u);
  if (!kSanitized) {
    EXPECT_TRUE(is_flat(report));
  }
}

}  // namespace
}  // namespace topreduce::laws
