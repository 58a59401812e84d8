#pragma once

#include <vector>

#include "topreduce/select/selector.h"
#include "topreduce/state_range.h"

namespace topreduce::select {

inline constexpr double kFarOff = 2;       ///< counts beyond this factor of the budget are far off
inline constexpr double kSteepness = 0.3;  ///< threshold ~ budget^-0.3, when that itself changes

/// The most that each parameter may send, so that a stale threshold cannot send everything: one
/// entry (as far as half the budget goes), twice its recent share of the budget, and the rest of
/// three budgets by size. While no threshold is known, one budget without the recent shares; all
/// of it if the budget is the whole model. Caps
/// belong to parameters, so the bucket cut does not matter; a fraction of an entry is rounded by a
/// shared random phase, so that no small parameter starves.
class Caps {
 public:
  explicit Caps(const Layout& layout);

  enum class Threshold { unknown, known };
  void begin(const Budget& budget, Threshold threshold);

  std::size_t operator[](std::size_t parameter) const { return caps_[parameter]; }
  void note(std::size_t parameter, std::size_t sent) {
    sent_[parameter] = static_cast<double>(sent);
  }
  double sent() const;  ///< in this step so far

  /// Tells the device of what `choose_on_device` will ask, and of a sample to be taken.
  void announce(const CompensatedGradient& compensated, float floor,
                std::span<const std::size_t> firsts = {}, std::size_t stride = 0);
  /// Replaces `selected` with the strongest entries of each parameter from `floor` up, as many as
  /// its cap allows, and notes them. On a device, after `announce`.
  void choose_on_device(const CompensatedGradient& compensated, float floor,
                        SparseVector& selected);

  void commit();
  void visit(std::string_view name, StateVisitor& visitor) {
    visit_parameters(visitor, name, shares_, [&](std::size_t p) {
      return StateRange{0, sizes_[p]};
    });
  }

 private:
  std::vector<double> sizes_;      // entries of each parameter
  std::vector<double> shares_;     // what each sent lately
  std::vector<double> sent_;       // what each sends in this step
  std::vector<std::size_t> caps_;  // the most each may send in this step
  std::vector<std::size_t> limits_;
};

}  // namespace topreduce::select
