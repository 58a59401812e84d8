#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

// Budgets are ratios within one run: every benchmark runs once per repetition, in random order, and
// the table at the end gives medians relative to a baseline. The clock is the CPU time of the one
// thread that works, so that other processes disturb it less.

namespace topreduce::bench {

/// Prints one row per benchmark: median, spread (half the distance of the quartiles), ratio of the
/// medians, ratio of the best.
class RatioTable : public benchmark::BenchmarkReporter {
 public:
  explicit RatioTable(std::string baseline) : baseline_(std::move(baseline)) {}

  bool ReportContext(const Context&) override { return true; }

  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type != Run::RT_Iteration) continue;
      row(run.run_name.function_name, run.family_index)
          .milliseconds.push_back(1e3 * run.cpu_accumulated_time /
                                  static_cast<double>(run.iterations));
    }
  }

  void Finalize() override {
    const Row baseline = row(baseline_);
    std::ranges::sort(rows_, {}, &Row::family);
    std::printf("%-46s %9s %7s %7s %7s\n", "", "median ms", "spread", "ratio", "best");
    for (const Row& each : rows_) {
      if (each.milliseconds.empty()) continue;
      const double median = each.quantile(0.5);
      const double spread = (each.quantile(0.75) - each.quantile(0.25)) / 2;
      std::printf("%-46s %9.3f %6.1f%% %7.3f %7.3f\n", each.name.c_str(), median,
                  100 * spread / median, median / baseline.quantile(0.5),
                  each.quantile(0) / baseline.quantile(0));
    }
  }

 private:
  struct Row {
    std::string name;
    std::int64_t family = 0;  // registration order; interleaved runs report in any order
    std::vector<double> milliseconds = {};

    double quantile(double share) const {
      if (milliseconds.empty()) return 0;
      std::vector<double> sorted = milliseconds;
      std::ranges::sort(sorted);
      return sorted[static_cast<std::size_t>(share * static_cast<double>(sorted.size() - 1))];
    }
  };

  Row& row(const std::string& name, std::int64_t family = 0) {
    const auto found = std::ranges::find(rows_, name, &Row::name);
    return found != rows_.end() ? *found : rows_.emplace_back(Row{name, family});
  }

  std::string baseline_;
  std::vector<Row> rows_;
};

/// Registers one row; its body is one pass.
template <class Body>
void add_row(const std::string& name, Body body) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [body](benchmark::State& state) {
                                 for (auto _ : state) body();
                               })
      ->Iterations(1)
      ->Unit(benchmark::kMillisecond);
}

/// The main() of a benchmark with a table of ratios. Command line flags come after, and win.
inline int run(int argc, char** argv, const char* baseline) {
  std::vector<std::string> words = {argv[0], "--benchmark_repetitions=31",
                                    "--benchmark_enable_random_interleaving=true"};
  words.insert(words.end(), argv + 1, argv + argc);
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  int count = static_cast<int>(pointers.size());
  benchmark::Initialize(&count, pointers.data());
  if (benchmark::ReportUnrecognizedArguments(count, pointers.data())) return 1;
  RatioTable table(baseline);
  benchmark::RunSpecifiedBenchmarks(&table);
  return 0;
}

}  // namespace topreduce::bench
