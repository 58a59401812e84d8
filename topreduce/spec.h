#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "topreduce/api.h"

namespace topreduce {

/// A name and its settings, as users write them: "topk:density=0.01,select=(carried:gain=0.2)".
/// A value in parentheses may hold anything, another spec for one.
struct Spec {
  std::string name;
  std::map<std::string, std::string, std::less<>> settings;
};

/// Throws std::invalid_argument with the place of the mistake.
TOPREDUCE_API Spec parse_spec(std::string_view text);

/// The text that parses to `spec`.
TOPREDUCE_API std::string to_string(const Spec& spec);

/// "; did you mean 'topk'?" if one of `known` is close to `word`, and in any case the known ones.
std::string suggest(std::string_view word, const std::vector<std::string>& known);

}  // namespace topreduce
