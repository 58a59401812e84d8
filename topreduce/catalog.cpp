#include "topreduce/catalog.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <stdexcept>

#include "topreduce/tuning/level.h"

namespace topreduce {

// First reading: the factories, one in each stage's file.
#define NOTHING(...)
#define FEEDBACK(name, ...)                                              \
  namespace feedback {                                                   \
  std::unique_ptr<Feedback> make_##name(const Settings&, const Layout&); \
  }
#define SELECT(name, ...)                                                \
  namespace select {                                                     \
  std::unique_ptr<Selector> make_##name(const Settings&, const Layout&); \
  }
#define EXCHANGE(name, ...)                                              \
  namespace exchange {                                                   \
  std::unique_ptr<Exchange> make_##name(const Settings&, const Layout&); \
  }
#define METHOD NOTHING
#define SETTING NOTHING
#include "topreduce/catalog.def"

namespace {

// The words of catalog.def.
constexpr Granularity model = Granularity::model, any = Granularity::any;
constexpr Choice alone = Choice::alone, together = Choice::together,
                 everything = Choice::everything;

Setting number(std::string_view name, std::string_view fallback, double low, double high,
               std::string_view meaning) {
  return {name, Setting::Kind::number, fallback, low, high, false, {}, meaning};
}
Setting fraction(std::string_view name, std::string_view fallback, std::string_view meaning) {
  return {name, Setting::Kind::number, fallback, 0, 1, true, {}, meaning};
}
Setting integer(std::string_view name, std::string_view fallback, double low, double high,
                std::string_view meaning) {
  return {name, Setting::Kind::integer, fallback, low, high, false, {}, meaning};
}
Setting shares(std::string_view name, std::string_view fallback, std::string_view meaning) {
  return {name, Setting::Kind::density, fallback, 0, 1, true, {}, meaning};
}
Setting choice(std::string_view name, std::string_view fallback, std::string_view choices,
               std::string_view meaning) {
  return {name, Setting::Kind::choice, fallback, 0, 0, false, choices, meaning};
}
Setting text(std::string_view name, std::string_view fallback, std::string_view meaning) {
  return {name, Setting::Kind::text, fallback, 0, 0, false, {}, meaning};
}

// The formats of wire/formats.def.
std::string_view values_words() {
  static const std::string words = [] {
    std::string all = "auto";
    for (const std::string_view name : wire::kValueFormatNames) all += "|" + std::string(name);
    return all;
  }();
  return words;
}

std::optional<double> to_number(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return {};
  return value;
}

std::string shortest(double value) {
  char digits[32];
  return {digits, std::to_chars(digits, digits + sizeof digits, value).ptr};
}

// "1%" or "1 %" as a share, to six digits.
std::optional<std::string> share_of_percent(std::string_view text) {
  if (!text.ends_with('%')) return {};
  const auto number = to_number(text.substr(0, text.find_last_not_of(" %") + 1));
  if (!number) return {};
  char digits[32];
  const auto general = std::chars_format::general;
  return std::string(digits,
                     std::to_chars(digits, digits + sizeof digits, *number / 100, general, 6).ptr);
}

// More than one number: what the steps of another run had.
bool is_sequence(std::string_view value) {
  if (to_number(value)) return false;
  try {
    return !tuning::Choices::parse(value).empty();
  } catch (const std::invalid_argument&) {
    return false;
  }
}

// What is wrong with `value`, or nothing.
std::string complaint(const Setting& setting, std::string_view value) {
  switch (setting.kind) {
    case Setting::Kind::text: return {};
    case Setting::Kind::choice: {
      const std::string words = "|" + std::string(setting.choices) + "|";
      const bool known = !value.empty() && value.find('|') == value.npos &&
                         words.find("|" + std::string(value) + "|") != words.npos;
      return known ? "" : "must be one of " + std::string(setting.choices);
    }
    case Setting::Kind::density:
      if (value == "auto" || is_sequence(value)) return {};
      [[fallthrough]];
    case Setting::Kind::integer:
    case Setting::Kind::number: break;
  }
  const bool whole = setting.kind == Setting::Kind::integer;
  const auto number = to_number(value);
  const std::string range = (whole ? "a whole number in " : "a number in ") +
                            std::string(setting.above_low ? "(" : "[") + shortest(setting.low) +
                            ", " + shortest(setting.high) + "]";
  const bool fits = number && *number >= setting.low && *number <= setting.high &&
                    !(setting.above_low && *number <= setting.low) &&
                    !(whole && *number != std::floor(*number));
  if (fits) return {};
  const auto share = setting.high == 1 ? share_of_percent(value) : std::nullopt;
  if (share && complaint(setting, *share).empty())
    return "must be a share, not a percentage: write " + *share;
  const bool density = setting.kind == Setting::Kind::density;
  return "must be " + range + (density ? ", auto, or a list such as 0.1*20 0.05" : "");
}

// What others call a density.
std::string_view our_word(std::string_view name) {
  constexpr std::string_view kDensities[] = {"ratio", "compress_ratio", "sparsity", "k"};
  return std::ranges::find(kDensities, name) == std::end(kDensities) ? name : "density";
}

template <class Entry>
const Entry& find(std::span<const Entry> entries, std::string_view what, std::string_view name) {
  std::vector<std::string> known;
  for (const Entry& entry : entries) {
    if (entry.name == name) return entry;
    known.emplace_back(entry.name);
  }
  throw std::invalid_argument("unknown " + std::string(what) + " '" + std::string(name) + "'" +
                              suggest(name, known));
}

}  // namespace

Settings::Settings(std::string_view owner, std::span<const Setting> known, const Spec& spec,
                   Choice choice)
    : choice_(choice) {
  std::vector<std::string> names;
  for (const Setting& setting : known) {
    names.emplace_back(setting.name);
    values_.emplace(setting.name, setting.fallback);
  }
  for (const auto& [name, value] : spec.settings) {
    const auto setting = std::ranges::find(known, name, &Setting::name);
    if (setting == known.end()) {
      throw std::invalid_argument(std::string(owner) + ": unknown setting '" + name + "'" +
                                  suggest(our_word(name), names));
    }
    if (const std::string wrong = complaint(*setting, value); !wrong.empty()) {
      throw std::invalid_argument(std::string(owner) + ": " + name + "=" + value + " " + wrong);
    }
    values_.find(name)->second = value;
  }
}

double Settings::number(std::string_view name) const {
  return *to_number(text(name));
}

std::uint64_t Settings::integer(std::string_view name) const {
  return static_cast<std::uint64_t>(number(name));
}

const std::string& Settings::text(std::string_view name) const {
  return values_.find(name)->second;
}

// Second to last reading: the tables.
std::span<const FeedbackEntry> feedbacks() {
  static const std::vector<FeedbackEntry> entries = {
#define FEEDBACK(name, granularity, summary, ...) \
  {#name, granularity, summary, {__VA_ARGS__}, feedback::make_##name},
#define SELECT NOTHING
#define EXCHANGE NOTHING
#define METHOD NOTHING
#define SETTING NOTHING
#include "topreduce/catalog.def"
  };
  return entries;
}

std::span<const SelectEntry> selectors() {
  static const std::vector<SelectEntry> entries = {
#define SELECT(name, granularity, summary, ...) \
  {#name, granularity, summary, {__VA_ARGS__}, select::make_##name},
#define FEEDBACK NOTHING
#define EXCHANGE NOTHING
#define METHOD NOTHING
#define SETTING NOTHING
#include "topreduce/catalog.def"
  };
  return entries;
}

std::span<const ExchangeEntry> exchanges() {
  static const std::vector<ExchangeEntry> entries = {
#define EXCHANGE(name, granularity, choice, summary, ...) \
  {{#name, granularity, summary, {__VA_ARGS__}, exchange::make_##name}, choice},
#define FEEDBACK NOTHING
#define SELECT NOTHING
#define METHOD NOTHING
#define SETTING NOTHING
#include "topreduce/catalog.def"
  };
  return entries;
}

std::span<const Method> methods() {
  static const std::vector<Method> entries = {
#define METHOD(name, ...) {#name, __VA_ARGS__},
#define FEEDBACK NOTHING
#define SELECT NOTHING
#define EXCHANGE NOTHING
#define SETTING NOTHING
#include "topreduce/catalog.def"
  };
  return entries;
}

std::span<const Setting> common_settings() {
  static const std::vector<Setting> entries = {
#define SETTING(...) __VA_ARGS__,
#define FEEDBACK NOTHING
#define SELECT NOTHING
#define EXCHANGE NOTHING
#define METHOD NOTHING
#include "topreduce/catalog.def"
  };
  return entries;
}

std::vector<StageInfo> stages() {
  std::vector<StageInfo> all;
  const auto list = [&](std::string_view kind, const auto& entries) {
    for (const auto& entry : entries) {
      all.push_back({kind, entry.name, entry.summary, entry.settings});
    }
  };
  list("feedback", feedbacks());
  list("select", selectors());
  list("exchange", exchanges());
  return all;
}

const FeedbackEntry& find_feedback(std::string_view name) {
  return find(feedbacks(), "feedback", name);
}
const SelectEntry& find_select(std::string_view name) {
  return find(selectors(), "select", name);
}
const ExchangeEntry& find_exchange(std::string_view name) {
  return find(exchanges(), "exchange", name);
}
const Method& find_method(std::string_view name) {
  return find(methods(), "method", name);
}

}  // namespace topreduce
