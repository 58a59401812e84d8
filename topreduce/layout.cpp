#include "topreduce/layout.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <unordered_set>

namespace topreduce {
namespace {

constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max() / 8;  // bytes can be counted

std::size_t entries(const Parameter& parameter) {
  if (std::ranges::find(parameter.shape, 0u) != parameter.shape.end()) return 0;
  std::size_t count = 1;
  for (const std::size_t extent : parameter.shape) {
    if (count > kMost / extent) {
      throw std::invalid_argument("layout: parameter '" + parameter.name + "' is too large");
    }
    count *= extent;
  }
  return count;
}

}  // namespace

Layout::Layout(std::vector<Parameter> parameters) : parameters_(std::move(parameters)) {
  std::unordered_set<std::string_view> names;
  for (Parameter& parameter : parameters_) {
    if (!names.insert(parameter.name).second) {
      throw std::invalid_argument("layout: two parameters are called '" + parameter.name + "'");
    }
    parameter.size = entries(parameter);
    if (parameter.size > kMost - size_) {
      throw std::invalid_argument("layout: with parameter '" + parameter.name +
                                  "' the model is too large");
    }
    parameter.offset = size_;
    size_ += parameter.size;
  }
}

std::optional<std::size_t> Layout::find(std::string_view name) const {
  const auto found = std::ranges::find(parameters_, name, &Parameter::name);
  if (found == parameters_.end()) return std::nullopt;
  return static_cast<std::size_t>(found - parameters_.begin());
}

}  // namespace topreduce
