#include "topreduce/spec.h"

#include <algorithm>
#include <cctype>
#include <numeric>
#include <stdexcept>

namespace topreduce {
namespace {

[[noreturn]] void fail(std::string_view text, std::string_view what) {
  throw std::invalid_argument("spec '" + std::string(text) + "': " + std::string(what));
}

std::string_view trim(std::string_view text) {
  const auto first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

// End of the setting that starts at `begin`: the next comma outside of parentheses.
std::size_t setting_end(std::string_view text, std::size_t begin) {
  int depth = 0;
  for (std::size_t i = begin; i < text.size(); ++i) {
    if (text[i] == '(') ++depth;
    if (text[i] == ')' && --depth < 0) fail(text, "a ')' without its '('");
    if (text[i] == ',' && depth == 0) return i;
  }
  if (depth > 0) fail(text, "a '(' without its ')'");
  return text.size();
}

std::string_view without_parentheses(std::string_view value) {
  return value.size() >= 2 && value.front() == '(' && value.back() == ')'
             ? value.substr(1, value.size() - 2)
             : value;
}

// Number of single-letter edits from a to b; two neighbours that changed places are one.
std::size_t edits(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before, last(b.size() + 1), row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before = std::move(last);
    last = row;
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] =
          std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0u : 1u)});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row.back();
}

}  // namespace

Spec parse_spec(std::string_view text) {
  const std::size_t colon = text.find(':');
  Spec spec;
  spec.name = trim(text.substr(0, colon));
  if (spec.name.empty()) fail(text, "it must start with a name, as in \"topk:density=0.01\"");
  if (colon == std::string_view::npos) return spec;
  for (std::size_t begin = colon + 1; begin <= text.size();) {
    const std::size_t end = setting_end(text, begin);
    const std::string_view setting = trim(text.substr(begin, end - begin));
    const std::size_t equals = setting.find('=');
    if (equals == std::string_view::npos || equals == 0) {
      fail(text, "'" + std::string(setting) + "' is not of the form name=value");
    }
    const auto name = trim(setting.substr(0, equals));
    const auto value = without_parentheses(trim(setting.substr(equals + 1)));
    if (!spec.settings.emplace(name, value).second) {
      fail(text, "'" + std::string(name) + "' is given twice");
    }
    begin = end + 1;
  }
  return spec;
}

std::string to_string(const Spec& spec) {
  std::string text = spec.name;
  char separator = ':';
  for (const auto& [name, value] : spec.settings) {
    const bool plain = value.find_first_of(":,()") == std::string::npos;
    text += separator + name + '=' + (plain ? value : '(' + value + ')');
    separator = ',';
  }
  return text;
}

std::string suggest(std::string_view word, const std::vector<std::string>& known) {
  if (known.empty()) return "; none is known";
  std::string text, lower(word);
  std::ranges::transform(lower, lower.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto nearest = std::ranges::min_element(
      known, {}, [&](const std::string& candidate) { return edits(lower, candidate); });
  if (edits(lower, *nearest) <= std::max<std::size_t>(1, word.size() / 3)) {
    text = "; did you mean '" + *nearest + "'?";
  }
  text += text.empty() ? "; known: " : " known: ";
  for (const std::string& name : known) text += name + (&name == &known.back() ? "" : ", ");
  return text;
}

}  // namespace topreduce
