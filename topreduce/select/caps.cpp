#include "topreduce/select/caps.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "topreduce/random.h"
#include "topreduce/select/strongest.h"

namespace topreduce::select {
namespace {

constexpr double kForgotten = 0x1p-20;  // of an entry

}  // namespace

Caps::Caps(const Layout& layout)
    : shares_(layout.count()), sent_(layout.count()), caps_(layout.count()) {
  for (const Parameter& parameter : layout.parameters()) {
    sizes_.push_back(static_cast<double>(parameter.size));
  }
}

void Caps::begin(const Budget& budget, Threshold threshold) {
  std::ranges::fill(sent_, 0.0);
  const bool known = threshold == Threshold::known;
  const auto k = static_cast<double>(budget.entries);
  const double recent = std::accumulate(shares_.begin(), shares_.end(), 0.0);
  // Nothing was sent for many steps: shares have halved to nothing, and say no more.
  const double by_share = known && recent > kForgotten ? 2 * k / recent : 0;
  const auto parameters = static_cast<double>(std::max<std::size_t>(1, caps_.size()));
  const double each = std::min(1.0, k / 2 / parameters);
  const double rest = (known ? 3 * k : k) - by_share * recent - each * parameters;
  const double by_size = rest / std::max(1.0, static_cast<double>(budget.model));
  // The phase keeps off 0 and 1, where the rounding of a long sum could add an entry.
  const RandomStream stream(budget.seed, budget.step, RandomStream::Purpose::caps);
  double end = 0.001 + 0.998 * stream.unit(0);
  for (std::size_t p = 0; p < caps_.size(); ++p) {
    const double start = end;
    end += each + by_share * shares_[p] + by_size * sizes_[p];
    caps_[p] = static_cast<std::size_t>(std::floor(end) - std::floor(start));
    if (budget.entries >= budget.model) caps_[p] = static_cast<std::size_t>(sizes_[p]);
  }
}

double Caps::sent() const {
  return std::accumulate(sent_.begin(), sent_.end(), 0.0);
}

void Caps::announce(const CompensatedGradient& compensated, float floor,
                    std::span<const std::size_t> firsts, std::size_t stride) {
  limits_.clear();
  for (const Segment& segment : compensated.segments()) limits_.push_back(caps_[segment.parameter]);
  compensated.device()->expect(
      {.floor = std::max(floor, kNonZero), .limits = limits_, .firsts = firsts, .stride = stride});
}

void Caps::choose_on_device(const CompensatedGradient& compensated, float floor,
                            SparseVector& selected) {
  compensated.device()->strongest(std::max(floor, kNonZero), limits_, selected);
  for (const Segment& segment : compensated.segments()) {
    const auto place = [&](std::size_t index) {
      return std::ranges::lower_bound(selected.indices, static_cast<Index>(index));
    };
    const auto count = place(segment.start + segment.size()) - place(segment.start);
    note(segment.parameter, static_cast<std::size_t>(count));
  }
}

void Caps::commit() {
  for (std::size_t p = 0; p < shares_.size(); ++p) shares_[p] = (shares_[p] + sent_[p]) / 2;
}

}  // namespace topreduce::select
