#pragma once

#include <cstddef>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "topreduce/state.h"

namespace topreduce {

/// The values that a number of a state may have; a file may hold any.
struct StateRange {
  double least = 0, most = 0;
  enum class Kind { real, whole } kind = Kind::real;
};

namespace state_range {
inline constexpr StateRange kFlag{0, 1, StateRange::Kind::whole};
inline constexpr StateRange kStep{0, 0x1p53, StateRange::Kind::whole};
/// A magnitude among floats.
inline constexpr StateRange kThreshold{0, std::numeric_limits<float>::max()};
/// A number of entries of a model that has so many.
constexpr StateRange entries_of(std::size_t model) {
  return {0, static_cast<double>(model), StateRange::Kind::whole};
}
}  // namespace state_range

/// Shows one number to `visitor`. What it fills in must lie in `range`, or std::invalid_argument;
/// only a visit that loads changes `value`.
void visit_number(StateVisitor& visitor, std::string_view name, double& value,
                  const StateRange& range);

/// The same for one number per parameter, each with its own range: range(parameter).
template <class RangeOf>
void visit_parameters(StateVisitor& visitor, std::string_view name, std::vector<double>& values,
                      RangeOf&& range);

/// Throws std::invalid_argument that names the number, what it is and what it may be.
void expect_in_range(std::string_view name, double value, const StateRange& range);

template <class RangeOf>
void visit_parameters(StateVisitor& visitor, std::string_view name, std::vector<double>& values,
                      RangeOf&& range) {
  if (visitor.purpose() == StateVisitor::Purpose::save) return visitor.parameters(name, values);
  std::vector<double> loaded = values;
  visitor.parameters(name, loaded);
  for (std::size_t p = 0; p < loaded.size(); ++p) expect_in_range(name, loaded[p], range(p));
  if (visitor.purpose() == StateVisitor::Purpose::load) values = std::move(loaded);
}

}  // namespace topreduce
