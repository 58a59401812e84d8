// kernels_bench: the passes over a model of 26 M entries, relative to one bare owed += gradient.

#include <algorithm>
#include <cmath>
#include <random>

#include "bench/ratios.h"
#include "topreduce/kernels/kernels.h"
#include "topreduce/storage.h"

namespace topreduce {
namespace {

constexpr std::size_t kEntries = 26'000'000;
constexpr std::size_t kBlock = 16384;  // what callers hand to a kernel at once

void fill_heavy_tailed(std::span<float> x, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> pool(1 << 20);
  for (float& value : pool) value = normal(rng) * std::exp(0.7f * normal(rng));
  for (float& value : x) value = pool[rng() % pool.size()];
}

struct Model {
  Model() {
    fill_heavy_tailed(owed, 1);
    fill_heavy_tailed(gradient, 2);
    std::ranges::fill(sum, 0.0f);
    std::ranges::fill(spare, 0.0f);
  }

  float threshold(double density) {
    std::vector<float> x(kEntries / 13);
    kernels::evaluate(kernels::Terms{owed, gradient, 1}.part(0, x.size()), x);
    const auto k = static_cast<std::size_t>(density * static_cast<double>(x.size()));
    return kernels::kth_magnitude(x, k);
  }

  std::size_t collect(float threshold) {
    const kernels::Terms terms{owed, gradient, 1};
    std::size_t count = 0;
    for (std::size_t start = 0; start < kEntries; start += kBlock) {
      count += kernels::collect_above(terms.part(start, std::min(kBlock, kEntries - start)),
                                      threshold, static_cast<Index>(start), indices.data() + count,
                                      values.data() + count, summary);
    }
    return count;
  }

  // Keeps what was collected at a lowered threshold if it is among the k largest.
  void finish(std::size_t count, std::size_t k) {
    const float cut = kernels::kth_magnitude(std::span(values).first(count), k);
    std::size_t kept = 0;
    for (std::size_t i = 0; i < count; ++i) {
      indices[kept] = indices[i];
      values[kept] = values[i];
      kept += std::abs(values[i]) >= cut;
    }
    benchmark::DoNotOptimize(kept);
  }

  // Zeroes block by block and delivers into a block while it is still in the cache.
  void absorb_and_scatter(std::span<const Index> delivered) {
    std::size_t next = 0;
    for (std::size_t start = 0; start < kEntries; start += kBlock) {
      const std::size_t count = std::min(kBlock, kEntries - start);
      kernels::absorb(std::span(sum).subspan(start, count), std::span(spare).subspan(start, count),
                      1);
      for (; next < delivered.size() && delivered[next] < start + count; ++next) {
        sum[delivered[next]] -= 0.5f;
        spare[delivered[next]] = 0.5f;
      }
    }
  }

  Buffer<float> owed = Buffer<float>(kEntries);
  Buffer<float> gradient = Buffer<float>(kEntries);
  Buffer<float> sum = Buffer<float>(kEntries);
  Buffer<float> spare = Buffer<float>(kEntries);
  Buffer<Index> indices = Buffer<Index>(kEntries + kernels::kCollectSlack);
  Buffer<float> values = Buffer<float>(kEntries + kernels::kCollectSlack);
  kernels::Summary summary;
};

void add_rows(Model& model) {
  using bench::add_row;
  const auto add = [&] { kernels::add(model.sum, model.gradient); };
  add_row("add", add);
  add_row("add again (A/A)", add);
  add_row("survey", [&] { kernels::summarize({model.owed, model.gradient, 1}, model.summary); });
  for (const double density : {0.001, 0.01, 0.1, 1.0}) {
    const float threshold = model.threshold(density);
    const std::string label = std::to_string(density * 100).substr(0, 5) + " %";
    add_row("collect_above " + label, [&model, threshold] { model.collect(threshold); });
    if (density > 0.01) continue;
    const auto k = static_cast<std::size_t>(density * kEntries);
    const float lowered = model.threshold(1.2 * density);
    add_row("collect_above + kth_magnitude + finish " + label,
            [&model, lowered, k] { model.finish(model.collect(lowered), k); });
    add_row("count_above " + label, [&model, threshold] {
      benchmark::DoNotOptimize(kernels::count_above({model.owed, model.gradient, 1}, threshold));
    });
    const std::size_t count = model.collect(lowered);
    const std::vector<float> candidates(model.values.begin(),
                                        model.values.begin() + static_cast<std::ptrdiff_t>(count));
    add_row("kth_magnitude of " + std::to_string(count),
            [candidates, k] { benchmark::DoNotOptimize(kernels::kth_magnitude(candidates, k)); });
  }
  add_row("evaluate", [&] { kernels::evaluate({model.owed, model.gradient, 1}, model.spare); });
  add_row("absorb", [&] { kernels::absorb(model.sum, model.spare, 1); });
  for (const double density : {0.01, 0.04}) {
    const std::size_t count = model.collect(model.threshold(density));
    const std::vector<Index> delivered(model.indices.begin(),
                                       model.indices.begin() + static_cast<std::ptrdiff_t>(count));
    add_row("absorb + scatter " + std::to_string(density * 100).substr(0, 4) + " %",
            [&model, delivered] { model.absorb_and_scatter(delivered); });
  }
}

}  // namespace
}  // namespace topreduce

int main(int argc, char** argv) {
  topreduce::Model model;
  topreduce::add_rows(model);
  return topreduce::bench::run(argc, argv, "add");
}
