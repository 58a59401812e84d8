#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "topreduce/api.h"

namespace topreduce {

/// One tensor of the model.
struct Parameter {
  std::string name;
  std::vector<std::size_t> shape;
  std::size_t size = 0;    ///< entries; filled in by Layout
  std::size_t offset = 0;  ///< first entry in the model's flat state; filled in by Layout
};

/// The model's map: every parameter in registration order, which is its place in the flat state for
/// life. How gradients are cut into buckets never changes it.
class TOPREDUCE_API Layout {
 public:
  Layout() = default;
  /// Names must be unique; a shape with a zero is an empty parameter, an empty shape a scalar.
  explicit Layout(std::vector<Parameter> parameters);

  std::span<const Parameter> parameters() const { return parameters_; }
  const Parameter& operator[](std::size_t id) const { return parameters_[id]; }
  std::size_t count() const { return parameters_.size(); }
  std::size_t size() const { return size_; }  ///< entries in the whole model

  std::optional<std::size_t> find(std::string_view name) const;

 private:
  std::vector<Parameter> parameters_;
  std::size_t size_ = 0;
};

}  // namespace topreduce
