#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string_view>

#include "topreduce/api.h"

namespace topreduce::tuning {

/// What the system counts of its processors, of all programs together.
struct ProcessorTimes {
  std::uint64_t busy = 0, idle = 0;  ///< of all processors, in the system's ticks

  /// Of the first line of Linux's /proc/stat; nothing if it is another text.
  TOPREDUCE_API static std::optional<ProcessorTimes> parse(std::string_view text);
  /// Of this machine; nothing where the system does not tell.
  TOPREDUCE_API static std::optional<ProcessorTimes> now();
};

/// How busy the processors of this machine have been lately.
class TOPREDUCE_API ProcessorLoad {
 public:
  /// From 0 to 1; 1 as long as nothing is known. Looks at the system a few times a second at most.
  double share();
  /// A guess: seconds of computing that a second of work beside it takes, while processors are so
  /// busy: less where others idle.
  static double taken_by_work(double share);

 private:
  using Clock = std::chrono::steady_clock;
  std::optional<ProcessorTimes> last_;
  Clock::time_point looked_{};
  bool known_ = false;
  double share_ = 1;
};

}  // namespace topreduce::tuning
