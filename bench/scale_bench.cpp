// scale_bench: what a rank sends in a step, by the number of ranks, which are threads of this
// process. 1 M entries in 40 parameters, k = 10 000. Kinds of steps: ordinary; `exact`, in which
// ok_topk finds its threshold anew; `regions`, in which it also agrees on regions. --ranks 8,64 for
// others than 8, 64 and 256.

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "topreduce/topreduce.h"

namespace topreduce::bench {
namespace {

constexpr std::size_t kParameters = 40, kEntries = 25'000, kModel = kParameters * kEntries;
constexpr std::uint64_t kSteps = 9, kPeriod = 4, kTau = 8;

struct Sums {
  double bytes = 0, messages = 0, most = 0, ranks = 0;
};
enum Kind : std::size_t { ordinary, exact, regions, kinds };

Kind kind_of(std::uint64_t step, bool has_kinds) {
  if (!has_kinds || step % kPeriod != 0) return ordinary;
  return step % kTau == 0 ? regions : exact;
}

Layout model() {
  std::vector<Parameter> parameters(kParameters);
  for (std::size_t p = 0; p < kParameters; ++p) {
    parameters[p].name = "layer" + std::to_string(p);
    parameters[p].shape = {kEntries / 100, 100};
  }
  return Layout(parameters);
}

// Long tails, as gradients have; half of it the same on all ranks.
float gradient(std::uint64_t step, std::uint64_t rank, std::uint64_t place) {
  const auto draw = [](std::uint64_t x) {
    x = (x ^ x >> 31) * 0x7fb5d329728ea185u;
    x = (x ^ x >> 27) * 0x81dadef4bc2dd44du;
    const auto unit = static_cast<float>((x ^ x >> 33) >> 40) * 0x1p-24f - 0.5f;
    return unit * unit * unit;
  };
  const std::uint64_t seed = place + (step << 24);
  return draw(2 * seed) + draw((2 * seed + 1) ^ (rank + 1) << 44);
}

std::array<Sums, kinds> run(const std::string& spec, int ranks, bool has_kinds) {
  std::array<Sums, kinds> sums;
  std::mutex mutex;
  run_ranks(ranks, [&](Communicator& comm) {
    Reducer reducer(model(), spec);
    std::vector<float> values(kModel);
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      for (std::size_t i = 0; i < kModel; ++i) {
        values[i] = gradient(step, static_cast<std::uint64_t>(comm.rank()), i);
      }
      reducer.begin(comm);
      for (std::size_t p = kParameters; p-- > 0;) {
        reducer.add(std::array{p}, std::span(values).subspan(p * kEntries, kEntries));
      }
      const StepStats stats = reducer.finish();
      if (step == 0 && has_kinds) continue;  // finds all of it for the first time
      const std::lock_guard lock(mutex);
      Sums& sum = sums[kind_of(step, has_kinds)];
      sum.bytes += static_cast<double>(stats.bytes_sent);
      sum.messages += static_cast<double>(stats.messages);
      sum.most = std::max(sum.most, static_cast<double>(stats.bytes_sent));
      ++sum.ranks;
    }
  });
  return sums;
}

void show(const char* name, const std::string& spec, std::span<const int> ranks, bool has_kinds) {
  static constexpr std::array<const char*, kinds> kNames = {"", ", exact step", ", regions too"};
  std::vector<std::array<Sums, kinds>> columns;
  for (const int count : ranks) columns.push_back(run(spec, count, has_kinds));
  for (std::size_t kind = 0; kind < kinds; ++kind) {
    if (columns[0][kind].ranks == 0) continue;
    std::printf("| %s%s |", name, kNames[kind]);
    for (const auto& column : columns) {
      const Sums& sum = column[kind];
      std::printf(" %.1f | %.1f | %.0f |", sum.bytes / sum.ranks / 1e3, sum.most / 1e3,
                  sum.messages / sum.ranks);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

void run_all(std::span<const int> ranks) {
  std::printf("kB that a rank sends (mean and most) and messages, per step\n\n| |");
  for (const int count : ranks) std::printf(" %d ranks: kB | most | messages |", count);
  std::printf("\n|---|");
  for (std::size_t i = 0; i < 3 * ranks.size(); ++i) std::printf("---|");
  std::printf("\n");
  const std::string kinds_of =
      ",exchange=(ok_topk:period=" + std::to_string(kPeriod) + ",tau=" + std::to_string(kTau) + ")";
  for (const char* granularity : {"bucket", "model"}) {
    const std::string settings = std::string(":density=0.01,granularity=") + granularity;
    const auto row = [&](const char* method, const std::string& more = {}) {
      show((std::string(method) + ", " + granularity).c_str(), method + settings + more, ranks,
           !more.empty());
    };
    for (const char* method : {"topk", "randk", "arc_topk", "topk_dsa", "gtopk"}) row(method);
    row("ok_topk", kinds_of);
  }
  show("dense", "dense", ranks, false);
}

}  // namespace
}  // namespace topreduce::bench

int main(int count, char** arguments) {
  std::vector<int> ranks = {8, 64, 256};
  if (count == 3 && std::string_view(arguments[1]) == "--ranks") {
    ranks.clear();
    std::istringstream words(arguments[2]);
    for (std::string word; std::getline(words, word, ',');)
      ranks.push_back(std::atoi(word.c_str()));
  } else if (count != 1) {
    std::fprintf(stderr, "usage: scale_bench [--ranks 8,64,256]\n");
    return 2;
  }
  topreduce::bench::run_all(ranks);
}
