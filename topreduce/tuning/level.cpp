#include "topreduce/tuning/level.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <optional>
#include <stdexcept>

namespace topreduce::tuning {
namespace {

constexpr std::uint64_t kMostSteps = std::uint64_t{1} << 53;

template <class Number>
std::optional<Number> number_of(std::string_view text) {
  Number value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return value;
}

std::optional<Level> level_of(std::string_view word, wire::ValueFormat whole) {
  const auto format = std::ranges::find(wire::kValueFormatNames, word);
  if (format != wire::kValueFormatNames.end()) {
    return Level{1, static_cast<wire::ValueFormat>(format - wire::kValueFormatNames.begin())};
  }
  const auto density = number_of<double>(word);
  if (!density || !(*density > 0) || *density > 1) return {};
  return Level{*density, whole};
}

}  // namespace

std::string to_word(const Level& level) {
  if (level.everything()) {
    return std::string(wire::kValueFormatNames[static_cast<std::size_t>(level.values)]);
  }
  char digits[32];
  return {digits, std::to_chars(digits, digits + sizeof digits, level.density).ptr};
}

Choices Choices::parse(std::string_view text, wire::ValueFormat whole) {
  Choices choices;
  constexpr std::string_view kBetween = " ,\t\n[]'\"";
  for (std::size_t begin = text.find_first_not_of(kBetween); begin != text.npos;) {
    const std::size_t end = std::min(text.find_first_of(kBetween, begin), text.size());
    const std::string_view run = text.substr(begin, end - begin);
    const std::size_t star = run.find('*');
    const auto level = level_of(run.substr(0, star), whole);
    const auto steps = star == run.npos ? std::optional<std::uint64_t>(1)
                                        : number_of<std::uint64_t>(run.substr(star + 1));
    if (!level || !steps || *steps == 0 || *steps > kMostSteps) {
      throw std::invalid_argument("'" + std::string(run) +
                                  "' is no density in (0, 1], no format of values such as int8, "
                                  "and none of them with a number of steps, as in 0.05*20");
    }
    choices.runs_.push_back({*level, *steps});
    begin = text.find_first_not_of(kBetween, end);
  }
  return choices;
}

void Choices::append(const Level& level) {
  if (!runs_.empty() && runs_.back().level == level) {
    ++runs_.back().steps;
  } else {
    runs_.push_back({level, 1});
  }
}

const Level& Choices::at(std::uint64_t step) const {
  for (const Run& run : runs_) {
    if (step < run.steps) return run.level;
    step -= run.steps;
  }
  return runs_.back().level;
}

std::uint64_t Choices::steps() const {
  return std::accumulate(runs_.begin(), runs_.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const Run& run) { return sum + run.steps; });
}

void Choices::cut(std::uint64_t steps) {
  for (std::size_t i = 0; i < runs_.size(); ++i) {
    if (steps < runs_[i].steps) {
      runs_[i].steps = steps;
      runs_.resize(steps == 0 ? i : i + 1);
      return;
    }
    steps -= runs_[i].steps;
  }
}

std::string Choices::text() const {
  std::string text;
  for (const Run& run : runs_) {
    text += (text.empty() ? "" : " ") + to_word(run.level);
    if (run.steps > 1) text += "*" + std::to_string(run.steps);
  }
  return text;
}

}  // namespace topreduce::tuning
