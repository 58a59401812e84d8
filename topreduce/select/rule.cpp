#include "topreduce/select/rule.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "topreduce/select/foresight.h"
#include "topreduce/stats.h"

namespace topreduce::select {
namespace {

// What of(stretch of terms) comes to, in order.
template <class Sum, class Of>
Sum sum_over_stretches(const kernels::Terms& terms, Threads& threads, const Of& of) {
  const Stretches stretches(terms.size());
  std::array<Sum, Stretches::kMost> sums{};
  threads.for_each(stretches.count(), [&](std::size_t s) {
    sums[s] = of(terms.part(stretches.begin(s), stretches.length(s)));
  });
  Sum all{};
  for (std::size_t s = 0; s < stretches.count(); ++s) all += sums[s];
  return all;
}

class RuleSelector final : public Selector {
 public:
  RuleSelector(std::string_view name, std::unique_ptr<Rule> rule, Finish finish,
               const Layout& layout)
      : rule_(std::move(rule)), finish_(finish), foresight_(name, layout) {}

  void begin(const Budget& budget) override {
    budget_ = budget;
    if (!whole_model()) foresight_.begin(budget);
  }

  void choose(const Pending& pending, SparseVector& selected, kernels::Seen& seen,
              double& look_seconds) override {
    if (!whole_model()) return foresight_.choose(pending, selected, seen, look_seconds);
    Stopwatch watch(look_seconds);
    selected.clear();
    parts_.clear();
    for (const Segment& segment : pending.segments()) parts_.push_back(pending.terms(segment));
    seen = pending.survey();
    if (seen.finite()) {
      apply(static_cast<double>(budget_.entries), seen, pending.threads(), selected);
    }
  }

  void commit() override {
    if (whole_model()) return;
    double threshold = foresight_.cut();
    if (!sends_all()) {
      const Sample& sample = foresight_.sample();
      parts_.assign(1, {{}, sample.values(), 1});
      kernels::Seen seen;
      kernels::survey(parts_[0], seen);
      scratch_.clear();
      const double k = static_cast<double>(budget_.entries) / sample.stride();
      const float found = seen.finite() ? apply(k, seen, Threads::none(), scratch_) : 0;
      if (found > 0) threshold = found;
    }
    foresight_.commit(threshold);
  }

  // A rule for the whole model looks at all of it; when buckets come it looks at a sample.
  bool works_on_device(Budget::Exchanges exchanges) const override {
    return exchanges == Budget::Exchanges::many;
  }

  void visit(StateVisitor& visitor) override { foresight_.visit(visitor); }

 private:
  bool whole_model() const { return budget_.exchanges == Budget::Exchanges::one; }
  bool sends_all() const { return budget_.entries >= budget_.model; }

  // Appends what is sent of `parts_`; returns the magnitude from which that is, 0 if nothing is.
  float apply(double k, const kernels::Seen& seen, Threads& threads, SparseVector& selected) {
    Vector vector{parts_, 0, std::bit_cast<float>(seen.largest_bits), threads};
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
    kernels::Seen again;
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
  Foresight foresight_;
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
