// network_bench: steps of one method on a simulated network (tests/simulated_network.h): the real
// exchanges, real bytes, counted time. One run per call, as words key=value; prints one line of
// JSON. `./run claims` calls it; by hand:
//
//   network_bench spec=ok_topk:density=0.01,granularity=model ranks=32 rate=1e9 latency=50e-6

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/simulated_network.h"
#include "topreduce/topreduce.h"

namespace topreduce::bench {
namespace {

using simulated::Network;
using Words = std::map<std::string, std::string>;

const Words kDefaults = {
    {"spec", "topk"},  // or noop, which exchanges nothing
    {"ranks", "4"},
    {"ranks_per_host", "1"},
    {"rate", "100e6"},        // of a host's link, bits per second
    {"latency", "50e-6"},     // seconds
    {"burst", "0"},           // bytes that a link lets through at once after a pause
    {"slow_rate", "0"},       // of the last host, if it has another
    {"inside_rate", "80e9"},  // between ranks of a host
    {"inside_latency", "5e-6"},
    {"cores", "0"},            // that all ranks share; 0: processors cost nothing
    {"per_frame", "0"},        // seconds that the system takes of them to send or receive a frame
    {"per_byte", "0"},         // and each of its bytes
    {"compute", "0"},          // seconds of forward and backward pass that take no core
    {"optimizer", "0"},        // seconds after the exchange, the same
    {"forward_work", "0"},     // seconds of a core at the end of the forward pass,
    {"backward_work", "0"},    // in the backward pass, as much before each gradient,
    {"after_work", "0"},       // and after the exchange, besides what the library takes
    {"period", "0"},           // from a step's start to the next one's; 0: as soon as a rank can
    {"shapes", "250x100*40"},  // of parameters, with commas between
    {"common", "0.5"},         // share of the gradients' variance that all ranks have in common
    {"steps", "6"},
    {"skip", "2"},  // steps that are not shown
};

Layout read_shapes(const std::string& text) {
  std::vector<Parameter> parameters;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    std::size_t times = 1;
    if (const auto star = word.find('*'); star != std::string::npos) {
      times = std::stoul(word.substr(star + 1));
      word.resize(star);
    }
    std::vector<std::size_t> shape;
    std::istringstream numbers(word);
    for (std::string number; std::getline(numbers, number, 'x');) {
      shape.push_back(std::stoul(number));
    }
    for (; times > 0; --times) {
      parameters.push_back({std::to_string(parameters.size()), shape});
    }
  }
  return Layout(std::move(parameters));
}

// Long tails, as gradients have. Ranks and steps look at other places of one pool.
class Gradients {
 public:
  Gradients(std::size_t entries, double common)
      : pool_(entries + kOffsets),
        common_(static_cast<float>(std::sqrt(common))),
        own_(static_cast<float>(std::sqrt(1 - common))) {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    for (float& value : pool_) value = normal(rng) * std::exp(0.7f * normal(rng));
  }
  void fill(std::uint64_t step, int rank, std::span<float> values) const {
    const float* all = pool_.data() + offset(step);
    const float* mine = pool_.data() + offset(step * 4096 + static_cast<std::uint64_t>(rank) + 99);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = common_ * all[i] + own_ * mine[i];
  }

 private:
  static constexpr std::size_t kOffsets = 1 << 18;
  static std::size_t offset(std::uint64_t key) {
    key = (key + 1) * 0x9e3779b97f4a7c15u;
    return static_cast<std::size_t>((key ^ key >> 29) % kOffsets);
  }
  std::vector<float> pool_;
  float common_, own_;
};

struct Step {
  double end = 0, after = 0;  // after: from the last gradient on, mean over the ranks
  double bytes = 0, most_bytes = 0, messages = 0, selected = 0, delivered = 0, rounds = 0;
};

class Run {
 public:
  explicit Run(const Words& words)
      : words_(words),
        layout_(read_shapes(words_.at("shapes"))),
        ranks_(static_cast<std::size_t>(number("ranks"))),
        steps_(static_cast<std::size_t>(number("steps"))),
        gradients_(layout_.size(), number("common")),
        sums_(steps_) {}

  void go() {
    Network network(topology());
    network.run([this](Network::Rank& comm) { train(comm); });
    print();
  }

 private:
  double number(const char* name) const { return std::strtod(words_.at(name).c_str(), nullptr); }

  simulated::Topology topology() const {
    const auto each = static_cast<std::size_t>(number("ranks_per_host"));
    if (each < 1 || ranks_ < 1 || ranks_ % each != 0) {
      throw std::invalid_argument("ranks must be a multiple of ranks_per_host");
    }
    auto topology = simulated::hosts(
        ranks_ / each, {number("rate") / 8, number("latency"), number("burst")}, each);
    if (number("slow_rate") > 0) topology.links.back().rate = number("slow_rate") / 8;
    topology.inside = {number("inside_rate") / 8, number("inside_latency")};
    topology.processors = {static_cast<std::size_t>(number("cores")), number("per_frame"),
                           number("per_byte")};
    return topology;
  }

  void train(Network::Rank& comm) {
    std::optional<Reducer> reducer;
    if (words_.at("spec") != "noop") reducer.emplace(layout_, words_.at("spec"));
    std::vector<float> values(layout_.size());
    for (std::size_t step = 0; step < steps_; ++step) {
      gradients_.fill(step, comm.rank(), values);
      comm.restart_processor();  // gradients cost nothing here
      wait_for_start(comm, step);
      const double computed = compute(comm, reducer, values);
      const StepStats stats = reducer ? reducer->finish() : StepStats();
      comm.work(number("after_work"));
      const double end = comm.now() + number("optimizer");
      while (!comm.wait_until(end)) comm.poll();
      add(step, end, end - computed, stats);
    }
  }

  void wait_for_start(Network::Rank& comm, std::size_t step) const {
    const double start = static_cast<double>(step) * number("period");
    if (step > 0 && start > 0 && comm.now() > start) {
      throw std::invalid_argument("period must be longer than a step takes");
    }
    while (!comm.wait_until(start)) comm.poll();
  }

  // Returns when the last gradient was there. A third of the waiting is the forward pass. What the
  // library does with a gradient does not hold up the backward pass, unless the next one is there
  // before it ends.
  double compute(Network::Rank& comm, std::optional<Reducer>& reducer, std::span<float> values) {
    const double forward = number("compute") / 3, backward = 2 * forward;
    const auto count = static_cast<double>(layout_.count());
    const auto size = static_cast<double>(layout_.size());
    const auto wait = [&](double end) {
      while (!comm.wait_until(end)) {
        if (reducer) reducer->progress();
      }
    };
    double computed = comm.now();
    if (reducer) reducer->begin(comm);
    wait(computed + forward);
    comm.work(number("forward_work"));
    computed = comm.now();
    for (std::size_t p = layout_.count(); p-- > 0;) {
      wait(computed + backward * static_cast<double>(layout_[p].size) / size);
      comm.work(number("backward_work") / count);
      computed = comm.now();
      if (reducer) {
        reducer->add(std::array{p}, values.subspan(layout_[p].offset, layout_[p].size));
      }
    }
    return computed;
  }

  void add(std::size_t step, double end, double after, const StepStats& stats) {
    const std::lock_guard lock(mutex_);
    Step& sum = sums_[step];
    const auto share = 1 / static_cast<double>(ranks_);
    sum.end = std::max(sum.end, end);
    sum.after += share * after;
    sum.bytes += share * static_cast<double>(stats.bytes_sent);
    sum.most_bytes = std::max(sum.most_bytes, static_cast<double>(stats.bytes_sent));
    sum.messages += share * static_cast<double>(stats.messages);
    sum.selected += share * static_cast<double>(stats.selected);
    sum.delivered = static_cast<double>(stats.delivered);
    sum.rounds = std::max(sum.rounds, static_cast<double>(stats.rounds));
  }

  void print() const {
    std::printf("{\"entries\": %zu, \"steps\": [", layout_.size());
    const auto skip = static_cast<std::size_t>(number("skip"));
    for (std::size_t step = skip; step < steps_; ++step) {
      const Step& sum = sums_[step];
      const double period = number("period");
      const double before = step > 0 ? sums_[step - 1].end : 0;
      const double start = period > 0 ? static_cast<double>(step) * period : before;
      std::printf(
          "%s{\"step\": %zu, \"seconds\": %.9g, \"after\": %.9g, \"bytes\": %.9g, "
          "\"most_bytes\": %.9g, \"messages\": %.6g, \"selected\": %.9g, \"delivered\": %.9g, "
          "\"rounds\": %.3g}",
          step > skip ? ", " : "", step, sum.end - start, sum.after, sum.bytes, sum.most_bytes,
          sum.messages, sum.selected, sum.delivered, sum.rounds);
    }
    std::printf("]}\n");
  }

  Words words_;
  Layout layout_;
  std::size_t ranks_, steps_;
  Gradients gradients_;
  std::mutex mutex_;
  std::vector<Step> sums_;
};

Words read(int count, char** arguments) {
  Words words = kDefaults;
  for (int i = 1; i < count; ++i) {
    const std::string word = arguments[i];
    const auto equals = word.find('=');
    const auto found = words.find(word.substr(0, equals));
    if (equals == std::string::npos || found == words.end()) {
      std::string known;
      for (const auto& [name, value] : kDefaults) known += ' ' + name + '=' + value;
      throw std::invalid_argument("'" + word + "' is not one of:" + known);
    }
    found->second = word.substr(equals + 1);
  }
  return words;
}

}  // namespace
}  // namespace topreduce::bench

int main(int count, char** arguments) {
  try {
    topreduce::bench::Run(topreduce::bench::read(count, arguments)).go();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "network_bench: %s\n", error.what());
    return 2;
  }
}
