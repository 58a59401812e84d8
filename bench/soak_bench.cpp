// ./run bench soak -- [--steps N] [--seed N] [--timeout-ms N]: steps with faults, rebuilds and
// resumes, random methods, 2 to 8 ranks as threads; fails as soon as a law does not hold.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>

#include "tests/soak.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::uint64_t steps = 2000;
  std::uint32_t seed = 1;
  int timeout_ms = 100;
};

Options options_of(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i];
    const char* const value = i + 1 < argc ? argv[i + 1] : "";
    char* end = nullptr;
    const unsigned long long number = std::strtoull(value, &end, 10);
    const bool known = name == "--steps" || name == "--seed" || name == "--timeout-ms";
    if (!known || end == value || *end != '\0' || number == 0) {
      throw std::invalid_argument("soak: --steps N, --seed N or --timeout-ms N, not '" +
                                  std::string(name) + " " + value + "'");
    }
    if (name == "--steps") options.steps = number;
    if (name == "--seed") options.seed = static_cast<std::uint32_t>(number);
    if (name == "--timeout-ms") options.timeout_ms = static_cast<int>(number);
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace topreduce::laws;
  try {
    const Options options = options_of(argc, argv);
    const auto start = Clock::now();
    auto shown = start;
    Soak soak(options.seed, std::chrono::milliseconds(options.timeout_ms));
    const SoakReport report = soak.run(options.steps, [&](const SoakReport& so_far) {
      if (Clock::now() - shown < std::chrono::seconds(10)) return;
      shown = Clock::now();
      std::printf("%llu steps\n", static_cast<unsigned long long>(so_far.steps));
      std::fflush(stdout);
    });
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    std::printf("%sseconds              %.0f\n", to_string(report).c_str(), seconds);
    if (is_flat(report)) return 0;
    std::fprintf(stderr, "soak: memory grows\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
