// topreduce_bench: what a step costs under MPI, against MPI_Allreduce of the same vector.
// One row per method, density and size; see kHelp.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <mpi.h>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "topreduce/topreduce.h"

namespace {

constexpr const char* kHelp = R"(usage: mpirun -n 8 topreduce_bench [options]

  --methods topk,ok_topk,arc_topk   words of the catalog
  --method ok_topk:rate=2,...       one more, with settings
  --entries 1M..64M                 sizes; a..b doubles from a to b; also a list: 1M,3M
  --density 0.001,0.01              share of the entries that each rank sends
  --values bf16                     how values travel
  --steps 20                        measured steps of each row, after 3 that are not
  --json                            one object per row, and nothing else
  --help                            this text

Milliseconds. p50, p99: of the whole step on its slowest rank. look to commit: medians of the mean
over the ranks; exchange holds the waiting for slower ranks too, least is that of the rank that
waits least: what the network itself takes. dense: p50 of MPI_Allreduce. times, and times of least:
how much longer dense takes. bytes: sent by each rank and step, in the mean. The last row of a size
is MPI_Allreduce again, after all others: how far its times is from 1 shows the noise.
)";

struct Options {
  std::vector<std::string> methods;  // empty: topk, ok_topk and arc_topk
  std::vector<std::size_t> entries;
  std::vector<std::string> densities = {"0.001", "0.01"};
  std::string values = "bf16";
  int steps = 20;
  enum class Output { table, json } output = Output::table;
};

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, ',');) words.push_back(word);
  return words;
}

std::size_t size_of(const std::string& word) {
  std::size_t end = 0;
  const double number = std::stod(word, &end);
  const std::string unit = word.substr(end);
  const double factor = unit == "M" ? 1e6 : unit == "k" ? 1e3 : unit.empty() ? 1 : 0;
  if (!(number * factor >= 1)) throw std::invalid_argument("size '" + word + "': write 1M or 500k");
  return static_cast<std::size_t>(number * factor);
}

std::vector<std::size_t> sizes_of(const std::string& text) {
  std::vector<std::size_t> sizes;
  for (const std::string& word : words_of(text)) {
    const std::size_t dots = word.find("..");
    const std::size_t first = size_of(word.substr(0, dots));
    const std::size_t last = dots == std::string::npos ? first : size_of(word.substr(dots + 2));
    for (std::size_t size = first; size <= last; size *= 2) sizes.push_back(size);
  }
  return sizes;
}

/// Nothing if help was asked for.
std::optional<Options> options_of(int argc, char** argv) {
  Options options;
  options.entries = sizes_of("1M..64M");
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--help" || name == "-h") return std::nullopt;
    if (name == "--json") {
      options.output = Options::Output::json;
      continue;
    }
    if (i + 1 == argc) throw std::invalid_argument(name + ": what? see --help");
    const std::string value = argv[++i];
    if (name == "--methods") {
      for (const std::string& word : words_of(value)) options.methods.push_back(word);
    } else if (name == "--method") {
      options.methods.push_back(value);
    } else if (name == "--entries") {
      options.entries = sizes_of(value);
    } else if (name == "--density") {
      options.densities = words_of(value);
    } else if (name == "--values") {
      options.values = value;
    } else if (name == "--steps") {
      options.steps = std::max(1, std::stoi(value));
    } else {
      throw std::invalid_argument("unknown option '" + name + "'; see --help");
    }
  }
  if (options.methods.empty()) options.methods = words_of("topk,ok_topk,arc_topk");
  return options;
}

// ---- measuring ---------------------------------------------------------------------------------

double quantile(std::vector<double> numbers, double share) {
  std::ranges::sort(numbers);
  const auto last = static_cast<double>(numbers.size() - 1);
  return numbers[static_cast<std::size_t>(std::ceil(share * last))];
}

double over_ranks(double number, MPI_Op how) {
  MPI_Allreduce(MPI_IN_PLACE, &number, 1, MPI_DOUBLE, how, MPI_COMM_WORLD);
  return number;
}

/// Heavy-tailed, other numbers in every step and on every rank.
class Gradients {
 public:
  explicit Gradients(int rank) : rng_(static_cast<unsigned>(rank + 1)), pool_(1 << 20) {
    std::normal_distribution<float> normal;
    for (float& x : pool_) x = normal(rng_) * std::exp(0.7f * normal(rng_));
  }
  void draw(std::vector<float>& gradient) {
    for (std::size_t start = 0; start < gradient.size();) {
      const std::size_t from = rng_() % (pool_.size() / 2);
      const std::size_t length = std::min(pool_.size() / 2, gradient.size() - start);
      std::copy_n(pool_.data() + from, length, gradient.data() + start);
      start += length;
    }
  }

 private:
  std::mt19937 rng_;
  std::vector<float> pool_;
};

/// Milliseconds that `body` takes on the slowest rank, all starting together.
template <class Body>
double milliseconds_of(Body&& body) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = MPI_Wtime();
  body();
  return 1e3 * over_ranks(MPI_Wtime() - start, MPI_MAX);
}

constexpr int kUnmeasured = 3;

/// Of MPI_Allreduce, step by step.
std::vector<double> dense_times(Gradients& gradients, std::vector<float>& gradient, int steps) {
  std::vector<double> times;
  for (int step = -1; step < steps; ++step) {
    gradients.draw(gradient);
    const double time = milliseconds_of([&] {
      MPI_Allreduce(MPI_IN_PLACE, gradient.data(), static_cast<int>(gradient.size()), MPI_FLOAT,
                    MPI_SUM, MPI_COMM_WORLD);
    });
    if (step >= 0) times.push_back(time);
  }
  return times;
}

struct Row {
  std::string method, density;
  std::size_t entries = 0;
  double rounds = 0, bytes = 0;
  std::vector<double> total;
  std::array<std::vector<double>, topreduce::kStageNames.size()> stages;
  std::vector<double> least;
  double dense = 0;
};

Row measure(topreduce::Communicator& comm, Gradients& gradients, std::vector<float>& gradient,
            const Options& options, const std::string& method, const std::string& density) {
  topreduce::Spec spec = topreduce::parse_spec(method);
  if (spec.name != "dense") spec.settings["density"] = density;
  spec.settings["values"] = options.values;
  const std::size_t rows = 1000;
  topreduce::Reducer reducer(topreduce::Layout({{"weight", {rows, gradient.size() / rows}},
                                                {"rest", {gradient.size() % rows}}}),
                             spec);
  Row row;
  row.method = method;
  row.density = density;
  row.entries = gradient.size();
  for (int step = -kUnmeasured; step < options.steps; ++step) {
    gradients.draw(gradient);
    const double time = milliseconds_of([&] { reducer.average(comm, gradient); });
    topreduce::StepStats stats = reducer.stats();
    if (step < 0) continue;
    row.total.push_back(time);
    for (std::size_t s = 0; s < row.stages.size(); ++s) {
      row.stages[s].push_back(1e3 * over_ranks(stats.seconds[s], MPI_SUM) / comm.size());
    }
    row.least.push_back(1e3 * over_ranks(stats[topreduce::Stage::network], MPI_MIN));
    row.bytes += over_ranks(static_cast<double>(stats.bytes_sent), MPI_SUM) / comm.size();
    row.rounds += static_cast<double>(stats.rounds);
  }
  row.bytes /= options.steps;
  row.rounds /= options.steps;
  return row;
}

// ---- showing -----------------------------------------------------------------------------------

constexpr std::array<const char*, topreduce::kStageNames.size()> kColumns = {
    "look", "choose", "pack", "exchange", "unpack", "commit"};

void show_head(int ranks) {
  std::printf("%d ranks, milliseconds\n%-10s %7s %10s %6s %11s", ranks, "method", "density",
              "entries", "rounds", "bytes");
  for (const char* name : kColumns) std::printf(" %8s", name);
  std::printf(" %8s %8s %8s %8s %7s %7s\n", "least", "p50", "p99", "dense", "times", "t.least");
}

void show(const Row& row) {
  std::printf("%-10s %7s %10zu %6.1f %11.0f", row.method.c_str(), row.density.c_str(), row.entries,
              row.rounds, row.bytes);
  for (const auto& times : row.stages) std::printf(" %8.2f", quantile(times, 0.5));
  const double p50 = quantile(row.total, 0.5), least = quantile(row.least, 0.5);
  std::printf(" %8.2f %8.2f %8.2f %8.2f %7.2f %7.2f\n", least, p50, quantile(row.total, 0.99),
              row.dense, row.dense / p50, row.dense / least);
}

// The A/A row: dense against itself.
void show_again(std::size_t entries, double dense, const std::vector<double>& again,
                Options::Output output, int ranks) {
  const double p50 = quantile(again, 0.5), p99 = quantile(again, 0.99);
  if (output == Options::Output::json) {
    std::printf("{\"ranks\": %d, \"method\": \"MPI_Allreduce\", \"entries\": %zu, ", ranks,
                entries);
    std::printf("\"dense_ms\": %.4f, \"again_ms\": %.4f, \"again_p99_ms\": %.4f}\n", dense, p50,
                p99);
    return;
  }
  std::printf("%-18s %10zu %*s %8.2f %8.2f %8.2f %7.2f\n", "MPI_Allreduce A/A", entries, 80, "",
              p50, p99, dense, dense / p50);
}

void show_json(const Row& row, int ranks) {
  std::printf("{\"ranks\": %d, \"method\": \"%s\", \"density\": %s, \"entries\": %zu, ", ranks,
              row.method.c_str(), row.density.c_str(), row.entries);
  std::printf("\"rounds\": %g, \"bytes\": %.0f, ", row.rounds, row.bytes);
  for (std::size_t s = 0; s < kColumns.size(); ++s) {
    std::printf("\"%s_ms\": %.4f, ", kColumns[s], quantile(row.stages[s], 0.5));
  }
  std::printf(
      "\"least_exchange_ms\": %.4f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"dense_ms\": %.4f}\n",
      quantile(row.least, 0.5), quantile(row.total, 0.5), quantile(row.total, 0.99), row.dense);
}

void run(const Options& options) {
  topreduce::comm::Mpi comm;
  Gradients gradients(comm.rank());
  const bool table = options.output == Options::Output::table;
  if (comm.rank() == 0 && table) show_head(comm.size());
  for (const std::size_t entries : options.entries) {
    std::vector<float> gradient(entries);
    const int dense_steps = std::max(3, options.steps / 4);
    const double dense = quantile(dense_times(gradients, gradient, dense_steps), 0.5);
    for (const std::string& density : options.densities) {
      for (const std::string& method : options.methods) {
        Row row = measure(comm, gradients, gradient, options, method, density);
        row.dense = dense;
        if (comm.rank() != 0) continue;
        table ? show(row) : show_json(row, comm.size());
        std::fflush(stdout);
      }
    }
    const auto again = dense_times(gradients, gradient, dense_steps);
    if (comm.rank() == 0) show_again(entries, dense, again, options.output, comm.size());
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  try {
    const auto options = options_of(argc, argv);
    if (!options && rank == 0) std::fputs(kHelp, stdout);
    if (options) run(*options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "topreduce_bench, rank %d: %s\n", rank, error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);  // the others may be waiting
  }
  MPI_Finalize();
  return 0;
}
