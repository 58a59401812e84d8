// wire_bench: what an index costs, what an entry takes to pack, unpack and add, what ok_topk sends,
// and how long packing takes relative to one bare owed += gradient over a model of 26 M entries.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <limits>
#include <numeric>
#include <random>

#include "bench/index_codes.h"
#include "bench/ratios.h"
#include "topreduce/comm/thread.h"
#include "topreduce/kernels/kernels.h"
#include "topreduce/reducer.h"
#include "topreduce/wire/gap_block.h"
#include "topreduce/wire/payload.h"
#include "topreduce/wire/rice.h"
#include "topreduce/wire/seal.h"

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

/// Nanoseconds of this thread's CPU time, which other processes disturb less.
template <class Body>
double timed(Body&& body) {
  const auto now = [] {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return 1e9 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec);
  };
  const double start = now();
  body();
  return now() - start;
}

/// Nanoseconds per index, the best of several times.
template <class Body>
double nanoseconds(std::size_t count, Body&& body) {
  double best = std::numeric_limits<double>::infinity();
  for (int time = 0; time < 7; ++time) {
    best = std::min(best, timed(body) / static_cast<double>(count));
  }
  return best;
}

void print_code(const char* places, const char* code, double bits, double entropy, double write,
                double read) {
  std::printf("%-16s %-13s %8.3f %8.3f %+8.3f %8.2f %8.2f\n", places, code, bits, entropy,
              bits - entropy, write, read);
}

/// Returns how many bytes it takes.
std::size_t write_rice(std::span<const Index> indices, Bytes& bytes) {
  wire::RiceWriter writer(bytes.data(), bytes.data() + bytes.size());
  std::array<Index, wire::kBlockGaps> gaps;
  std::size_t following = 0;
  while (!indices.empty()) {
    const std::size_t count = std::min(gaps.size(), indices.size());
    gaps[0] = indices[0] - static_cast<Index>(following);
    for (std::size_t i = 1; i < count; ++i) gaps[i] = indices[i] - indices[i - 1] - 1;
    const std::size_t sum = indices[count - 1] + 1 - following - count;
    writer.put(std::span(gaps).first(count), sum);
    following = indices[count - 1] + std::size_t{1};
    indices = indices.subspan(count);
  }
  std::byte* const end = writer.finish();
  std::byte* const all = std::copy(writer.back(), bytes.data() + bytes.size(), end);
  return static_cast<std::size_t>(all - bytes.data());
}

void compare_codes(const char* places, const std::vector<Index>& indices) {
  const std::size_t count = indices.size();
  const double p = static_cast<double>(count) / kEntries;
  const double entropy = -std::log2(p) - (1 - p) / p * std::log2(1 - p);
  const auto per_index = [count](std::size_t bits) {
    return static_cast<double>(bits) / static_cast<double>(count);
  };
  std::vector<Index> read(count);

  Bytes bytes(wire::most_rice_bytes(count));
  std::size_t size = 0;
  const double rice_write = nanoseconds(count, [&] { size = write_rice(indices, bytes); });
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

// ---- nanoseconds per entry ---------------------------------------------------------------------

/// Appends a message with `entries`, as an exchange sends it; they become what receivers read.
void pack(wire::ValueFormat values, wire::Pieces pieces, SparseVector& entries, Bytes& out) {
  const std::size_t start = out.size();
  out.resize(start + wire::kSealBytes);
  wire::encode_entries(values, pieces, entries, out, entries);
  const auto payload = std::span(out).subspan(start + wire::kSealBytes);
  std::ranges::copy(wire::seal({}, 0, payload), out.begin() + static_cast<std::ptrdiff_t>(start));
}

void unpack(wire::ValueFormat values, wire::Pieces pieces, std::span<const std::byte> message,
            SparseVector& entries) {
  wire::decode_entries(values, pieces, wire::open({}, 0, message), entries);
}

/// Four ranks' messages about one model of 40 parameters, on one thread, seals included.
class Journey {
 public:
  Journey(double density, wire::ValueFormat values) : values_(values) {
    for (std::size_t p = 0; p < kPieces; ++p) {
      pieces_.push_back({static_cast<Index>(p * kPlaces / kPieces),
                         static_cast<Index>((p + 1) * kPlaces / kPieces)});
    }
    for (std::size_t r = 0; r < kRanks; ++r) {
      std::mt19937_64 rng(r);
      std::geometric_distribution<std::uint64_t> gap(density);
      std::normal_distribution<float> normal;
      for (std::uint64_t at = gap(rng); at < kPlaces; at += gap(rng) + 1) {
        entries_[r].push_back(static_cast<Index>(at), normal(rng));
      }
    }
  }

  void measure(const char* density, std::string_view name) {
    double best[4] = {1e9, 1e9, 1e9, 1e9};
    for (int time = 0; time < 15; ++time) {
      double taken[3] = {};
      for (std::size_t r = 0; r < kRanks; ++r) {
        sent_.assign(entries_[r]);  // packing rounds them
        out_.clear();
        make_room(out_, wire::kSealBytes + wire::largest_payload(sent_.size(), kPieces));
        taken[0] += timed([&] { pack(values_, pieces_, sent_, out_); });
        taken[1] += timed([&] { unpack(values_, pieces_, out_, parts_[r]); });
      }
      taken[2] += timed([&] { adder_.add(parts_, kPlaces, sum_); });
      std::size_t count = 0;
      for (const SparseVector& part : parts_) count += part.size();
      for (std::size_t i = 0; i < 3; ++i) {
        taken[i] /= static_cast<double>(count);
        best[i] = std::min(best[i], taken[i]);
      }
      best[3] = std::min(best[3], taken[1] + taken[2]);
    }
    std::printf("%-8s %-8s %8.2f %8.2f %8.2f %12.2f %10.3f\n", density, std::string(name).c_str(),
                best[0], best[1], best[2], best[3],
                8.0 * static_cast<double>(out_.size()) / static_cast<double>(sent_.size()));
  }

 private:
  static constexpr std::size_t kPlaces = 10'000'000, kPieces = 40, kRanks = 4;

  wire::ValueFormat values_;
  std::vector<wire::Piece> pieces_;
  std::array<SparseVector, kRanks> entries_, parts_;
  SparseVector sent_, sum_;
  Bytes out_;
  Adder adder_;
};

void time_entries() {
  std::printf(
      "\nnanoseconds per entry, one thread, 10 M places in 40 pieces, best of 15 times; add is "
      "that\n"
      "of four parts, by entry of a part\n\n");
  std::printf("%-8s %-8s %8s %8s %8s %12s %10s\n", "density", "values", "pack", "unpack", "add",
              "unpack + add", "bits");
  for (const auto& [text, density] :
       {std::pair("0.1 %", 0.001), std::pair("1 %", 0.01), std::pair("10 %", 0.1)}) {
    for (const wire::ValueFormat values :
         {wire::ValueFormat::int4, wire::ValueFormat::bf16, wire::ValueFormat::fp32}) {
      Journey(density, values)
          .measure(text, wire::kValueFormatNames[static_cast<std::size_t>(values)]);
    }
  }
}

// ---- what ok_topk sends ------------------------------------------------------------------------

/// Normal numbers, drawn once.
const std::vector<float>& pool() {
  static const std::vector<float> numbers = [] {
    std::mt19937 rng(7);
    std::normal_distribution<float> normal;
    std::vector<float> drawn(1 << 20);
    for (float& x : drawn) x = normal(rng);
    return drawn;
  }();
  return numbers;
}

/// Ranks see the same signal, which changes every eight steps, and noise of their own; tails are
/// heavy, and rows differ in size.
void fill_gradient(int rank, int step, std::span<float> gradient) {
  const std::vector<float>& numbers = pool();
  const std::size_t mask = numbers.size() - 1;
  std::mt19937 common(static_cast<unsigned>(step / 8));
  std::mt19937 own(static_cast<unsigned>(1000 * step + rank + 1));
  const std::size_t signals = common(), noises = own();
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const float size = 1 + std::abs(numbers[i / 500 * 7919 & mask]);
    const float signal = numbers[(signals + i * 3) & mask],
                noise = numbers[(noises + i * 5) & mask];
    gradient[i] = size * (signal + noise) * (1 + signal * signal);
  }
}

/// What a rank sends per step, in units of the bound and of the budget; means over a period.
struct Sent {
  double bytes, selected, delivered;
};

Sent sent_by_ok_topk(int ranks, const char* values, const char* granularity) {
  constexpr int kPeriod = 32;
  const Layout layout({{"embed", {600, 1000}},
                       {"norm", {1000}},
                       {"block", {1200, 1000}},
                       {"bias", {1000}},
                       {"head", {600, 1000}}});
  std::vector<Sent> sums(static_cast<std::size_t>(ranks));
  const double k = 0.01 * static_cast<double>(layout.size());
  const double bound = 4 * 2 * k * (ranks - 1) / ranks;
  run_ranks(ranks, [&](Communicator& comm) {
    Reducer reducer(layout, std::string("ok_topk:density=0.01,values=") + values +
                                ",granularity=" + granularity);
    std::vector<float> gradient(layout.size());
    Sent& sum = sums[static_cast<std::size_t>(comm.rank())];
    for (int step = 0; step < 2 * kPeriod; ++step) {
      fill_gradient(comm.rank(), step, gradient);
      reducer.begin(comm);
      for (std::size_t id = layout.count(); id-- > 0;) {
        const std::size_t bucket[] = {id};
        reducer.add(bucket, std::span(gradient).subspan(layout[id].offset, layout[id].size));
      }
      const StepStats& stats = reducer.finish();
      if (step < kPeriod) continue;
      const double share = 1.0 / kPeriod / ranks;
      sum.bytes += share * static_cast<double>(stats.bytes_sent) / bound;
      sum.selected += share * static_cast<double>(stats.selected) / k;
      sum.delivered += share * static_cast<double>(stats.delivered) / k;
    }
  });
  Sent all{};
  for (const Sent& sum : sums) {
    all.bytes += sum.bytes;
    all.selected += sum.selected;
    all.delivered += sum.delivered;
  }
  return all;
}

void count_ok_topk() {
  std::printf(
      "\nok_topk 1 %% of 2.4 M entries in 5 buckets: bytes sent per rank and step, relative to\n"
      "2k(P-1)/P words of 32 bits; entries chosen and delivered, relative to k; means over a\n"
      "period of 32 steps\n\n");
  std::printf("%-8s %-8s %6s %8s %8s %10s\n", "values", "", "ranks", "bytes", "chosen",
              "delivered");
  for (const char* values : {"fp32", "bf16", "int8", "int4", "int2"}) {
    for (const char* granularity : {"bucket", "model"}) {
      for (const int ranks : {4, 8}) {
        const Sent sent = sent_by_ok_topk(ranks, values, granularity);
        std::printf("%-8s %-8s %6d %8.3f %8.3f %10.3f\n", values, granularity, ranks, sent.bytes,
                    sent.selected, sent.delivered);
        std::fflush(stdout);
      }
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

  void pack_and_unpack(wire::ValueFormat values) {
    const wire::Piece whole[] = {{0, kEntries}};
    sent.assign(entries);  // packing rounds them
    out.clear();
    make_room(out, wire::kSealBytes + wire::largest_payload(sent.size(), 1));
    pack(values, whole, sent, out);
    unpack(values, whole, out, received);
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
  for (std::size_t i = 0; i < wire::kValueFormatNames.size(); ++i) {
    add_row("pack + unpack 1 %, " + std::string(wire::kValueFormatNames[i]),
            [&model, i] { model.pack_and_unpack(static_cast<wire::ValueFormat>(i)); });
  }
}

}  // namespace
}  // namespace topreduce

int main(int argc, char** argv) {
  topreduce::compare_all_codes();
  topreduce::time_entries();
  topreduce::count_ok_topk();
  std::printf("\n");
  topreduce::Model model;
  topreduce::add_rows(model);
  return topreduce::bench::run(argc, argv, "owed += gradient");
}
