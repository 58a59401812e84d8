#include "topreduce/select/rule.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "topreduce/select/foresight.h"
#include "topreduce/stats.h"

namespace topreduce::select {
namespace {

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
    seen = {};
    for (const Segment& segment : pending.segments()) {
      parts_.push_back(pending.terms(segment));
      kernels::survey(parts_.back(), seen);
    }
    if (seen.finite()) apply(static_cast<double>(budget_.entries), seen, selected);
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
      const float found = seen.finite() ? apply(k, seen, scratch_) : 0;
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
  float apply(double k, const kernels::Seen& seen, SparseVector& selected) {
    Vector vector{parts_, 0, std::bit_cast<float>(seen.largest_bits)};
    for (const kernels::Terms& part : parts_) vector.size += part.size();
    const bool all = sends_all() || k >= static_cast<double>(vector.size);
    const float cut = all ? kNonZero : std::max(rule_->cut(vector, k, budget_), kNonZero);
    const auto wanted = static_cast<std::size_t>(std::max(1.0, std::round(k)));
    const std::size_t limit = all || finish_ == Finish::all ? vector.size : wanted;
    collect(limit, cut);
    if (finish_ == Finish::exact && strongest_.size() < limit) collect(limit, kNonZero);
    const float weakest = strongest_.finish(selected);
    return finish_ == Finish::all ? cut : weakest;
  }

  void collect(std::size_t limit, float cut) {
    strongest_.begin(limit, cut);
    kernels::Seen again;
    std::size_t first = 0;
    for (const kernels::Terms& part : parts_) {
      strongest_.look(part, static_cast<Index>(first), again);
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
  for (const kernels::Terms& part : parts) count += kernels::count_above(part, threshold);
  return static_cast<double>(count);
}

kernels::Moments Vector::moments() const {
  kernels::Moments sum;
  for (const kernels::Terms& part : parts) sum += kernels::moments(part);
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
