// stages_bench: look + choose and commit + decode of a step as users run it, relative to one bare
// owed += gradient over the same 26 M entries (design: at most 1.3 and 2).

#include <cmath>
#include <random>

#include "bench/ratios.h"
#include "topreduce/catalog.h"

namespace topreduce {
namespace {

constexpr std::size_t kEntries = 26'000'000;
constexpr std::size_t kParameters = 26;
constexpr int kGradients = 3;  // taken in turn, so that no two steps look alike
constexpr std::size_t kRanks = 4;

class Step {
 public:
  Step() : layout_(make_layout()) {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    std::vector<float> pool(1 << 20);
    for (float& value : pool) value = normal(rng) * std::exp(0.7f * normal(rng));
    const auto fill = [&](std::vector<float>& gradient) {
      gradient.resize(kEntries);
      for (float& value : gradient) value = pool[rng() % pool.size()];
    };
    for (auto& gradient : gradients_) fill(gradient);
    fill(spare_);
    for (std::size_t p = 0; p < kParameters; ++p) {
      segments_.push_back({.parameter = p,
                           .start = static_cast<Index>(layout_[p].offset),
                           .offset = layout_[p].offset,
                           .count = layout_[p].size});
    }
    // One residual is looked at and holds a gradient's worth; the other one takes the commits.
    looked_at_ = make_residual();
    written_ = make_residual();
    use(spare_);
    looked_at_->commit({segments_, looked_at_->base(), 1}, {}, kRanks, 1);
  }

  template <class Entry>
  static Settings settings(const Entry& entry) {
    return {entry.name, entry.settings, {}};
  }

  std::unique_ptr<select::Selector> make(const char* name) const {
    return find_select(name).make(settings(find_select(name)), layout_);
  }

  void choose(select::Selector& selector, double density) {
    use(gradients_[++turn_ % kGradients]);
    selector.begin({turn_, 0, static_cast<std::size_t>(density * kEntries), kEntries});
    kernels::Seen seen;
    double looked = 0;
    selector.choose({segments_, looked_at_->base(), 1}, selected_, seen, looked);
    benchmark::DoNotOptimize(seen);
    selector.commit();
  }

  // What `kRanks` ranks deliver that chose `density` each, without overlap.
  static exchange::Delivery delivery(double density) {
    const auto stride = static_cast<std::size_t>(1 / density);
    exchange::Delivery delivery;
    for (std::size_t i = 0; i < kEntries; i += stride / kRanks) {
      delivery.sum.push_back(static_cast<Index>(i), 1);
      if (i % stride == 0) delivery.settled.push_back(static_cast<Index>(i), 1);
    }
    return delivery;
  }

  void commit(const exchange::Delivery& delivery) {
    use(spare_);
    benchmark::DoNotOptimize(
        written_->commit({segments_, written_->base(), 1}, delivery, kRanks, 1));
  }

  void add() { kernels::add(sum_, gradients_[0]); }

 private:
  static Layout make_layout() {
    std::vector<Parameter> parameters;
    for (std::size_t p = 0; p < kParameters; ++p) {
      parameters.push_back({std::to_string(p), {kEntries / kParameters}});
    }
    return Layout(std::move(parameters));
  }
  std::unique_ptr<feedback::Feedback> make_residual() const {
    return find_feedback("residual").make(settings(find_feedback("residual")), layout_);
  }
  void use(std::vector<float>& gradient) {
    for (Segment& segment : segments_) {
      segment.gradient = std::span(gradient).subspan(segment.offset, kEntries / kParameters);
    }
  }

  Layout layout_;
  std::vector<float> gradients_[kGradients];
  std::vector<float> spare_;
  std::vector<float> sum_ = std::vector<float>(kEntries);
  std::vector<Segment> segments_;
  std::unique_ptr<feedback::Feedback> looked_at_, written_;
  SparseVector selected_;
  std::uint64_t turn_ = 0;
};

void add_rows(Step& step) {
  using bench::add_row;
  add_row("owed += gradient", [&] { step.add(); });
  add_row("owed += gradient (A/A)", [&] { step.add(); });
  for (const char* select : {"carried", "topk"}) {
    for (const double density : {0.001, 0.01}) {
      std::shared_ptr<select::Selector> selector = step.make(select);
      for (int i = 0; i < 4; ++i) step.choose(*selector, density);
      add_row("look + choose, " + std::string(select) + " " +
                  std::to_string(density * 100).substr(0, 3) + " %",
              [&step, selector, density] { step.choose(*selector, density); });
    }
  }
  for (const double density : {0.001, 0.01}) {
    add_row("commit + decode, 4 ranks of " + std::to_string(density * 100).substr(0, 3) + " %",
            [&step, delivery = Step::delivery(density)] { step.commit(delivery); });
  }
}

}  // namespace
}  // namespace topreduce

int main(int argc, char** argv) {
  topreduce::Step step;
  topreduce::add_rows(step);
  return topreduce::bench::run(argc, argv, "owed += gradient");
}
