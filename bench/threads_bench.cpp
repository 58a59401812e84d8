// threads_bench: what more threads give for look and commit, over 26 M entries. Every row is
// measured with one thread, with one again (A/A), and with more, in turns; --threads 4 for others
// than 2.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string_view>

#include "bench/step.h"

namespace topreduce::bench {
namespace {

constexpr int kTurns = 31;

/// Milliseconds on the clock: what one thread saves another may spend.
double milliseconds_of(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

double median(std::vector<double> times) {
  std::ranges::nth_element(times, times.begin() + kTurns / 2);
  return times[kTurns / 2];
}

void compare(const char* name, Threads& more, const std::function<void(Threads&)>& body) {
  Threads* const who[] = {&Threads::none(), &Threads::none(), &more};
  std::vector<double> times[3];
  for (int turn = -1; turn < kTurns; ++turn) {
    for (std::size_t i = 0; i < 3; ++i) {
      const std::size_t row = (i + static_cast<std::size_t>(turn + 1)) % 3;
      const double time = milliseconds_of([&] { body(*who[row]); });
      if (turn >= 0) times[row].push_back(time);
    }
  }
  const double one = median(times[0]), again = median(times[1]), many = median(times[2]);
  std::printf("%-42s %9.3f %9.3f %9.3f %7.2f %7.2f\n", name, one, again, many, one / again,
              one / many);
  std::fflush(stdout);
}

void run(std::size_t count) {
  Threads more(count);
  Step step;
  std::printf("%-42s %9s %9s %5zu thr. %7s %7s\n", "milliseconds, 26 M entries", "1 thread",
              "1 again", count, "A/A", "gain");
  for (const char* name : {"carried", "topk"}) {
    const auto selector = step.make(name);
    for (int i = 0; i < 4; ++i) step.choose(*selector, 0.01);
    compare((std::string("look + choose, ") + name + " 1 %").c_str(), more, [&](Threads& threads) {
      step.use(threads);
      step.choose(*selector, 0.01);
    });
  }
  const exchange::Result result = Step::result(0.01);
  compare("commit + decode, 4 ranks of 1 %", more, [&](Threads& threads) {
    step.use(threads);
    step.commit(result);
  });
}

}  // namespace
}  // namespace topreduce::bench

int main(int argc, char** argv) {
  const bool asked = argc == 3 && std::string_view(argv[1]) == "--threads";
  if (argc > 1 && !asked) {
    std::fputs("usage: threads_bench [--threads 2]\n", stderr);
    return 1;
  }
  topreduce::bench::run(asked ? std::strtoul(argv[2], nullptr, 10) : 2);
  return 0;
}
