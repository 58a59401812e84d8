#include "topreduce/select/rule.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "topreduce/select/threshold_predictor.h"
#include "topreduce/stats.h"

namespace topreduce::select {
namespace {

// What of(stretch of terms) comes to, in order.
template <class Sum, class Of>
Sum sum_over_stretches(const kernels::Terms& terms, Threads& threads, const Of& of) {
  const Chunks chunks(terms.size());
  std::array<Sum, Chunks::kMost> sums{};
  threads.for_each(chunks.count(), [&](std::size_t s) {
    sums[s] = of(terms.part(chunks.begin(s), chunks.length(s)));
  });
  Sum all{};
  for (std::size_t s = 0; s < chunks.count(); ++s) all += sums[s];
  return all;
}

class RuleSelector final : public Selector {
 public:
  RuleSelector(std::string_view name, std::unique_ptr<Rule> rule, Finish finish,
               const Layout& layout)
      : rule_(std::move(rule)), finish_(finish), predictor_(name, layout) {}

  void begin(const Budget& budget) override {
    budget_ = budget;
    if (!whole_model()) predictor_.begin(budget);
  }

  void choose(const CompensatedGradient& compensated, SparseVector& selected,
              kernels::Summary& summary, double& look_seconds) override {
    if (!whole_model()) return predictor_.choose(compensated, selected, summary, look_seconds);
    Stopwatch watch(look_seconds);
    selected.clear();
    parts_.clear();
    for (const Segment& segment : compensated.segments())
      parts_.push_back(compensated.terms(segment));
    summary = compensated.summarize();
    if (summary.finite()) {
      apply(static_cast<double>(budget_.entries), summary, compensated.threads(), selected);
    }
  }

  void commit() override {
    if (whole_model()) return;
    double threshold = predictor_.cut();
    if (!sends_all()) {
      const Sample& sample = predictor_.sample();
      parts_.assign(1, {{}, sample.values(), 1});
      kernels::Summary summary;
      kernels::summarize(parts_[0], summary);
      scratch_.clear();
      const double k = static_cast<double>(budget_.entries) / sample.stride();
      const float found = summary.finite() ? apply(k, summary, Threads::none(), scratch_) : 0;
      if (found > 0) threshold = found;
    }
    predictor_.commit(threshold);
  }

  // A rule for the whole model looks at all of it; when buckets come it looks at a sample.
  bool works_on_device(Budget::Exchanges exchanges) const override {
    return exchanges == Budget::Exchanges::many;
  }

  void visit(StateVisitor& visitor) override { predictor_.visit(visitor); }

 private:
  bool whole_model() const { return budget_.exchanges == Budget::Exchanges::one; }
  bool sends_all() const { return budget_.entries >= budget_.model; }

  // Appends what is sent of `parts_`; returns the magnitude from which that is, 0 if nothing is.
  float apply(double k, const kernels::Summary& summary, Threads& threads, SparseVector& selected) {
    Vector vector{parts_, 0, std::bit_cast<float>(summary.largest_bits), threads};
    for (const kernels::Terms& part : parts_) vector.size += part.size();
    const bool all = sends_all() || k >= static_cast<double>(vector.size);
    const float cut = all ? kNonZero : std::max(rule_->cut(vector, k, budget_), kNonZero);
    const auto wanted = static_cast<std::size_t>(std::max(1.0, std::round(k)));
    const std::size_t limit = all || finish_ == Finish::all ? vector.size : wanted;
    collect(limit, cut, threads);
    if (finish_ == Finish::exact && strongest_.size() < limit) collect(limit, kNonZero, threads);
    const float weakest = strongest_.finish(selected);
    return finish_ == Finish::all ? cut : weakest;
  }

  void collect(std::size_t limit, float cut, Threads& threads) {
    strongest_.begin(limit, cut);
    kernels::Summary again;
    std::size_t first = 0;
    for (const kernels::Terms& part : parts_) {
      strongest_.look(part, static_cast<Index>(first), again, threads);
      first += part.size();
    }
  }

  std::unique_ptr<Rule> rule_;
  Finish finish_;
  Budget budget_;
  std::vector<kernels::Terms> parts_;
  Strongest strongest_;
  SparseVector scratch_;
  ThresholdPredictor predictor_;
};

}  // namespace

double Vector::count_from(float threshold) const {
  std::size_t count = 0;
  for (const kernels::Terms& part : parts) {
    const auto above = [&](const kernels::Terms& x) { return kernels::count_above(x, threshold); };
    count += sum_over_stretches<std::size_t>(part, threads, above);
  }
  return static_cast<double>(count);
}

kernels::Moments Vector::moments() const {
  kernels::Moments sum;
  for (const kernels::Terms& part : parts) {
    sum += sum_over_stretches<kernels::Moments>(part, threads, kernels::moments);
  }
  return sum;
}

float just_above(double t) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return std::nextafter(static_cast<float>(std::clamp(t, -kLargest, kLargest)),
                        std::numeric_limits<float>::infinity());
}

std::unique_ptr<Selector> make_selector(std::string_view name, std::unique_ptr<Rule> rule,
                                        Finish finish, const Layout& layout) {
  return std::make_unique<RuleSelector>(name, std::move(rule), finish, layout);
}

}  // namespace topreduce::select
