#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <string_view>

namespace topreduce {

/// Where a step's time goes, in the order the data flows.
enum class Stage { look, choose, pack, network, unpack, commit };
inline constexpr std::array<std::string_view, 6> kStageNames = {"look",    "choose", "pack",
                                                                "network", "unpack", "commit"};

/// What one step cost this rank and what it moved.
struct StepStats {
  std::uint64_t step = 0;       ///< number of the step, from 0
  std::uint64_t entries = 0;    ///< entries in the model
  double density = 1;           ///< share of the entries that each rank was to send
  std::uint64_t budget = 0;     ///< entries that each rank meant to send (k)
  std::uint64_t selected = 0;   ///< entries that this rank sent
  std::uint64_t delivered = 0;  ///< entries of the sum that everyone applies
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t messages = 0;      ///< sent
  std::uint64_t bytes_inside = 0;  ///< sent to ranks with other parts of the model, if it has any
  std::uint64_t messages_inside = 0;  ///< the same
  std::uint64_t rounds = 0;           ///< of all exchanges and the vote; those of several overlap
  double kept_energy = 1;             ///< 1 - |owed + gradient - settled|^2 / |owed + gradient|^2
  double owed_norm = 0;               ///< norm of what this rank owes after the step
  double seconds_exchanging = 0;      ///< in which exchanges were under way
  double seconds_exposed = 0;         ///< of these, after the last gradient
  double seconds_computed = 0;        ///< from the start of the step to its last gradient
  double seconds_waited = 0;          ///< from then until the means were there
  bool finite = true;  ///< false: some rank had an infinity or NaN; nothing was committed
  std::array<double, kStageNames.size()> seconds{};

  double& operator[](Stage stage) { return seconds[static_cast<std::size_t>(stage)]; }
};

/// Adds the life time of this object to a number of seconds.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double& seconds_;
  Clock::time_point start_ = Clock::now();
};

/// The same for the time that a processor works for the calling thread: without waiting, and
/// without what others do on that processor meanwhile.
class ProcessorWatch {
 public:
  explicit ProcessorWatch(double& seconds) : seconds_(seconds) {}
  ~ProcessorWatch() { seconds_ += now() - start_; }
  ProcessorWatch(const ProcessorWatch&) = delete;
  ProcessorWatch& operator=(const ProcessorWatch&) = delete;

 private:
  static double now() {
    std::timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }
  double& seconds_;
  double start_ = now();
};

}  // namespace topreduce
