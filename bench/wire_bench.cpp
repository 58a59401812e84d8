// wire_bench: what an index costs, what ok_topk sends, and how long packing takes relative to one
// bare owed += gradient over a model of 26 M entries.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <random>

#include "bench/index_codes.h"
#include "bench/ratios.h"
#include "topreduce/comm/thread.h"
#include "topreduce/kernels/kernels.h"
#include "topreduce/reducer.h"
#include "topreduce/wire/message.h"
#include "topreduce/wire/rice.h"

namespace topreduce {
namespace {

constexpr std::size_t kEntries = 26'000'000;

std::vector<Index> uniform(std::size_t universe, double density) {
  std::mt19937_64 rng(1);
  std::geometric_distribution<std::uint64_t> gap(density);
  std::vector<Index> indices;
  for (std::uint64_t at = gap(rng); at < universe; at += gap(rng) + 1) {
    indices.push_back(static_cast<Index>(at));
  }
  return indices;
}

/// Rows of 1000 places, some a hundred times denser than others.
std::vector<Index> by_rows(std::size_t universe, double density) {
  std::mt19937_64 rng(1);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> unit;
  std::vector<Index> indices;
  double here = 0;
  for (std::size_t at = 0; at < universe; ++at) {
    if (at % 1000 == 0) here = density * std::exp(normal(rng) - 0.5);
    if (unit(rng) < here) indices.push_back(static_cast<Index>(at));
  }
  return indices;
}

// ---- indices -----------------------------------------------------------------------------------

/// Nanoseconds per index, the best of several times.
template <class Body>
double nanoseconds(std::size_t count, Body&& body) {
  double best = std::numeric_limits<double>::infinity();
  for (int time = 0; time < 7; ++time) {
    const auto start = std::chrono::steady_clock::now();
    body();
    const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
    best = std::min(best, taken.count() / static_cast<double>(count));
  }
  return best;
}

void print_code(const char* places, const char* code, double bits, double entropy, double write,
                double read) {
  std::printf("%-16s %-13s %8.3f %8.3f %+8.3f %8.2f %8.2f\n", places, code, bits, entropy,
              bits - entropy, write, read);
}

void compare_codes(const char* places, const std::vector<Index>& indices) {
  const std::size_t count = indices.size();
  const double p = static_cast<double>(count) / kEntries;
  const double entropy = -std::log2(p) - (1 - p) / p * std::log2(1 - p);
  const auto per_index = [count](std::size_t bits) {
    return static_cast<double>(bits) / static_cast<double>(count);
  };
  std::vector<Index> read(count);

  Bytes bytes(wire::RiceWriter::most_bytes(count));
  std::size_t size = 0;
  const double rice_write = nanoseconds(count, [&] {
    wire::RiceWriter writer(bytes.data());
    Index following = 0;
    for (const Index index : indices) {
      writer.push(index - following);
      following = index + 1;
    }
    size = static_cast<std::size_t>(writer.finish() - bytes.data());
  });
  const double rice_read =
      nanoseconds(count, [&] { wire::read_rice(std::span(bytes).first(size), kEntries, read); });
  print_code(places, "rice", per_index(8 * size), entropy, rice_write, rice_read);

  bench::EliasFano elias_fano;
  const double ef_write = nanoseconds(count, [&] { elias_fano.encode(indices, kEntries); });
  const double ef_read = nanoseconds(count, [&] { elias_fano.decode(read); });
  print_code(places, "elias-fano", per_index(elias_fano.bits()), entropy, ef_write, ef_read);

  bench::BlockBitmap bitmap;
  const double map_write = nanoseconds(count, [&] { bitmap.encode(indices, kEntries); });
  const double map_read = nanoseconds(count, [&] { bitmap.decode(read); });
  print_code(places, "block bitmap", per_index(bitmap.bits()), entropy, map_write, map_read);
}

void compare_all_codes() {
  std::printf("bits per index, 26 M places; entropy is that of uniform places\n\n");
  std::printf("%-16s %-13s %8s %8s %8s %8s %8s\n", "places", "code", "bits", "entropy", "more",
              "ns write", "ns read");
  compare_codes("uniform 0.1 %", uniform(kEntries, 0.001));
  compare_codes("uniform 1 %", uniform(kEntries, 0.01));
  compare_codes("uniform 10 %", uniform(kEntries, 0.1));
  compare_codes("uniform 50 %", uniform(kEntries, 0.5));
  compare_codes("by rows 1 %", by_rows(kEntries, 0.01));
}

// ---- what ok_topk sends ------------------------------------------------------------------------

/// Ranks see the same signal and noise of their own; rows differ in size.
std::vector<float> gradient_of(int rank, int step, std::size_t n) {
  std::mt19937 common(static_cast<unsigned>(step / 8)), rows(7);
  std::mt19937 own(static_cast<unsigned>(1000 * step + rank + 1));
  std::normal_distribution<float> normal;
  std::vector<float> gradient(n);
  float size = 1;
  for (std::size_t i = 0; i < n; ++i) {
    if (i % 500 == 0) size = std::exp(0.8f * normal(rows));
    const float signal = normal(common), noise = normal(own);
    gradient[i] = size * (signal + noise) * std::exp(0.5f * std::abs(signal));
  }
  return gradient;
}

/// Bytes per rank and step in words of 32 bits, relative to 2k(P-1)/P; mean over a period.
double sent_by_ok_topk(int ranks, const char* values, const char* granularity) {
  constexpr int kPeriod = 32;
  constexpr std::size_t kRows = 150, kWidth = 1000;
  const Layout layout({{"embed", {kRows, kWidth}},
                       {"norm", {300}},
                       {"block", {2 * kRows, kWidth}},
                       {"bias", {150}},
                       {"head", {kRows, kWidth}}});
  std::vector<double> bytes(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](Communicator& comm) {
    Reducer reducer(layout, std::string("ok_topk:density=0.01,values=") + values +
                                ",granularity=" + granularity);
    for (int step = 0; step < 2 * kPeriod; ++step) {
      auto gradient = gradient_of(comm.rank(), step, layout.size());
      reducer.begin(comm);
      for (std::size_t id = layout.count(); id-- > 0;) {
        const std::size_t bucket[] = {id};
        reducer.add(bucket, std::span(gradient).subspan(layout[id].offset, layout[id].size));
      }
      const StepStats& stats = reducer.finish();
      if (step >= kPeriod) {
        bytes[static_cast<std::size_t>(comm.rank())] +=
            static_cast<double>(stats.bytes_sent) / kPeriod;
      }
    }
  });
  const double k = 0.01 * static_cast<double>(layout.size());
  const double bound = 4 * 2 * k * (ranks - 1) / ranks;
  return std::accumulate(bytes.begin(), bytes.end(), 0.0) / ranks / bound;
}

void count_ok_topk() {
  std::printf(
      "\nok_topk 1 %% of 600 450 entries in 5 buckets: bytes sent per rank and step, mean\n"
      "over a period of 32, relative to 2k(P-1)/P words of 32 bits\n\n");
  std::printf("%-8s %-8s %8s %8s\n", "values", "", "4 ranks", "8 ranks");
  for (const char* values : {"fp32", "bf16", "int8", "int4", "int2", "sign"}) {
    for (const char* granularity : {"bucket", "model"}) {
      std::printf("%-8s %-8s %8.3f %8.3f\n", values, granularity,
                  sent_by_ok_topk(4, values, granularity), sent_by_ok_topk(8, values, granularity));
      std::fflush(stdout);
    }
  }
}

// ---- time --------------------------------------------------------------------------------------

struct Model {
  Model() {
    std::mt19937 rng(2);
    std::normal_distribution<float> normal;
    for (const Index index : uniform(kEntries, 0.01)) entries.push_back(index, normal(rng));
    std::ranges::fill(owed, 0.0f);
    std::ranges::fill(gradient, 1.0f);
  }

  void pack_and_unpack(wire::Values values) {
    const wire::Envelope envelope{.universe = kEntries, .values = values};
    const wire::Piece whole[] = {{0, kEntries}};
    sent.assign(entries);  // packing rounds them
    out.clear();
    make_room(out, wire::largest_message(sent.size(), 1));
    wire::pack(envelope, whole, wire::Vote::yes, sent, out);
    wire::unpack(envelope, whole, out, received);
  }

  Buffer<float> owed = Buffer<float>(kEntries), gradient = Buffer<float>(kEntries);
  SparseVector entries, sent, received;
  Bytes out;
};

void add_rows(Model& model) {
  using bench::add_row;
  const auto add = [&] { kernels::add(model.owed, model.gradient); };
  add_row("owed += gradient", add);
  add_row("owed += gradient (A/A)", add);
  for (std::size_t i = 0; i < wire::kValuesNames.size(); ++i) {
    add_row("pack + unpack 1 %, " + std::string(wire::kValuesNames[i]),
            [&model, i] { model.pack_and_unpack(static_cast<wire::Values>(i)); });
  }
}

}  // namespace
}  // namespace topreduce

int main(int argc, char** argv) {
  topreduce::compare_all_codes();
  topreduce::count_ok_topk();
  std::printf("\n");
  topreduce::Model model;
  topreduce::add_rows(model);
  return topreduce::bench::run(argc, argv, "owed += gradient");
}
