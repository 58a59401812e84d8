// Data-parallel training of a small language model under MPI, dense and with us:
//
//   mpirun -n 4 train_mpi                         both, for 400 steps
//   mpirun -n 4 train_mpi --steps 1000 topk:density=0.01,warmup_steps=10,ramp_steps=100

#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mpi.h>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <topreduce/topreduce.h>
#include <vector>

#include "character_model.h"

namespace {

constexpr std::size_t kBatch = 64;  // of each rank
constexpr float kRate = 0.3f, kMomentum = 0.9f;
constexpr std::size_t kWindow = CharacterModel::kContext + 1;

struct Options {
  int steps = 400;
  std::string text = TOPREDUCE_EXAMPLE_TEXT;
  std::vector<std::string> methods;
};

Options options_of(std::span<char*> words) {
  Options options;
  for (std::size_t i = 1; i < words.size(); ++i) {
    const std::string word = words[i];
    if (word.starts_with("--") && i + 1 == words.size()) {
      throw std::invalid_argument(word + ": a value is missing");
    }
    if (word == "--steps") {
      options.steps = std::stoi(words[++i]);
    } else if (word == "--text") {
      options.text = words[++i];
    } else if (word.starts_with("-")) {
      throw std::invalid_argument(word + "? known: --steps, --text, and methods");
    } else {
      options.methods.push_back(word);
    }
  }
  if (options.methods.empty()) options.methods = {"ok_topk:density=0.01"};
  return options;
}

/// A text as numbers of its characters; the last tenth is kept for validation.
struct Text {
  std::vector<unsigned char> ids;
  std::size_t vocabulary = 0;

  explicit Text(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    ids.assign(std::istreambuf_iterator<char>(file), {});
    if (ids.size() < 1000) throw std::invalid_argument("no text in " + path + "; see --text");
    std::map<unsigned char, unsigned char> numbers;
    for (const unsigned char c : ids) numbers[c] = 0;
    for (auto& [character, number] : numbers) {
      number = static_cast<unsigned char>(vocabulary++);
    }
    for (unsigned char& c : ids) c = numbers[c];
  }

  std::span<const unsigned char> training() const {
    return std::span(ids).first(ids.size() / 10 * 9);
  }
  std::span<const unsigned char> validation() const {
    return std::span(ids).subspan(ids.size() / 10 * 9);
  }
};

/// Over windows spread evenly, each rank its share of them.
double validation_loss(CharacterModel& model, const Text& text, topreduce::Communicator& comm) {
  constexpr std::size_t kWindows = 4000;
  const auto part = text.validation();
  const auto rank = static_cast<std::size_t>(comm.rank()),
             ranks = static_cast<std::size_t>(comm.size());
  double sum = 0;
  for (std::size_t i = rank; i < kWindows; i += ranks) {
    const std::size_t start = i * (part.size() - kWindow) / kWindows;
    sum += model.loss(part.subspan(start, kWindow), 0, {});
  }
  MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  return sum / kWindows;
}

struct Result {
  double loss = 0, bytes = 0, averaging = 0, seconds = 0;
};

/// Trains from the same start; an empty `method` averages with MPI_Allreduce.
Result train(const std::string& method, const Options& options, const Text& text,
             topreduce::Communicator& comm) {
  CharacterModel model(text.vocabulary);
  std::vector<topreduce::Parameter> parameters;
  for (auto& [name, shape] : model.shapes()) parameters.push_back({.name = name, .shape = shape});
  std::unique_ptr<topreduce::Reducer> reducer;
  if (!method.empty()) {
    reducer = std::make_unique<topreduce::Reducer>(topreduce::Layout(parameters), method);
  }

  std::vector<float>& weights = model.weights();
  std::vector<float> gradient(weights.size()), speed(weights.size());
  std::mt19937 rng(static_cast<unsigned>(comm.rank() + 1));  // every rank draws its own batches
  const auto part = text.training();
  Result result;
  const double start = MPI_Wtime();
  for (int step = 1; step <= options.steps; ++step) {
    std::fill(gradient.begin(), gradient.end(), 0.0f);
    for (std::size_t i = 0; i < kBatch; ++i) {
      model.loss(part.subspan(rng() % (part.size() - kWindow), kWindow), 1.0f / kBatch, gradient);
    }

    const double before = MPI_Wtime();
    if (reducer) {
      result.bytes += static_cast<double>(reducer->average(comm, gradient).bytes_sent);
    } else {
      MPI_Allreduce(MPI_IN_PLACE, gradient.data(), static_cast<int>(gradient.size()), MPI_FLOAT,
                    MPI_SUM, MPI_COMM_WORLD);
      for (float& x : gradient) x /= static_cast<float>(comm.size());
    }
    result.averaging += MPI_Wtime() - before;

    for (std::size_t i = 0; i < weights.size(); ++i) {
      speed[i] = kMomentum * speed[i] + (1 - kMomentum) * gradient[i];
      weights[i] -= kRate * speed[i];
    }
    if (step == options.steps || step % std::max(1, options.steps / 4) == 0) {
      result.loss = validation_loss(model, text, comm);
      if (comm.rank() == 0) {
        std::printf("%-24s step %4d of %d: validation loss %.3f\n",
                    method.empty() ? "MPI_Allreduce" : method.c_str(), step, options.steps,
                    result.loss);
        std::fflush(stdout);
      }
    }
  }
  result.seconds = MPI_Wtime() - start;
  if (!reducer) {  // what the best dense all-reduce sends
    result.bytes = options.steps * 8.0 * static_cast<double>(gradient.size()) * (comm.size() - 1) /
                   comm.size();
  }
  return result;
}

void run(const Options& options) {
  topreduce::comm::Mpi comm;
  const Text text(options.text);
  std::vector<std::string> methods = options.methods;
  methods.insert(methods.begin(), "");
  std::vector<Result> results;
  for (const std::string& method : methods) results.push_back(train(method, options, text, comm));
  if (comm.rank() != 0) return;
  std::printf("\n%-24s %8s %16s %13s %8s\n", "averaged by", "loss", "kB/rank and step",
              "ms averaging", "seconds");
  for (std::size_t i = 0; i < methods.size(); ++i) {
    const Result& r = results[i];
    std::printf("%-24s %8.3f %16.1f %13.2f %8.1f\n",
                methods[i].empty() ? "MPI_Allreduce" : methods[i].c_str(), r.loss,
                r.bytes / options.steps / 1e3, 1e3 * r.averaging / options.steps, r.seconds);
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  try {
    run(options_of({argv, static_cast<std::size_t>(argc)}));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_mpi: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);  // the others may be waiting
  }
  MPI_Finalize();
}
