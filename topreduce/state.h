#pragma once

#include <span>
#include <string>
#include <string_view>

#include "topreduce/api.h"

namespace topreduce {

/// The largest magnitude that anything remembered can have: no step leaves more (reducer.cpp).
inline constexpr float kLargestRemembered = 0x1p102f;

/// Sees, and may replace, everything that a run must keep for its next step to be the same. One
/// visit serves saving and loading, so the two cannot drift apart.
class TOPREDUCE_API StateVisitor {
 public:
  virtual ~StateVisitor() = default;

  /// What a visit is for. A state is loaded in two visits: `check` fills in numbers, which are
  /// looked at and dropped, and leaves entries alone; `load` fills in everything.
  enum class Purpose { save, check, load };
  virtual Purpose purpose() const = 0;

  /// One value per entry of the remembered parameters, in their order.
  virtual void entries(std::string_view name, std::span<float> values) = 0;
  /// One value per remembered parameter, in their order.
  virtual void parameters(std::string_view name, std::span<double> values) = 0;
  /// A single value.
  virtual void number(std::string_view name, double& value) = 0;
  /// A text that all ranks have alike: what the run chose. A state may be without it; then it stays
  /// empty, and the run chooses anew.
  virtual void text(std::string_view, std::string&) {}
};

}  // namespace topreduce
