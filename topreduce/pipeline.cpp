#include "topreduce/pipeline.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <sstream>
#include <stdexcept>

namespace topreduce {
namespace {

using wire::ValueFormat;

bool lists(std::span<const Setting> settings, std::string_view name) {
  return std::ranges::find(settings, name, &Setting::name) != settings.end();
}

// A method's word for one of its stages, or the user's; and which of the method's own settings
// belong to that stage ("topk:gain=0.2" sets the gain of its select stage).
template <class Entry>
Spec stage_spec(const Spec& method, std::string_view given, std::string_view fallback,
                const Entry& (*find)(std::string_view)) {
  Spec spec = parse_spec(given.empty() ? fallback : given);
  for (const Setting& setting : find(spec.name).settings) {
    const auto found = method.settings.find(setting.name);
    if (found != method.settings.end()) spec.settings.insert(*found);
  }
  return spec;
}

template <class Stage>
std::unique_ptr<Stage> make(const Entry<Stage>& entry, const Spec& spec, const Layout& layout,
                            Choice choice) {
  return entry.make(Settings(entry.name, entry.settings, spec, choice), layout);
}

// The spec with every default filled in.
Spec complete(const Spec& spec, std::span<const Setting> known) {
  Spec full = spec;
  for (const Setting& setting : known) full.settings.emplace(setting.name, setting.fallback);
  return full;
}

// '*' stands for any letters.
bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] == '*') {
    return matches(pattern.substr(1), name) || (!name.empty() && matches(pattern, name.substr(1)));
  }
  return !name.empty() && pattern[0] == name[0] && matches(pattern.substr(1), name.substr(1));
}

// The names that fit: the first three, and how many more there are.
std::string names_like(const Layout& layout, std::string_view pattern) {
  constexpr int kShown = 3;
  std::string text;
  int count = 0;
  for (const Parameter& parameter : layout.parameters()) {
    if (!matches(pattern, parameter.name) || ++count > kShown) continue;
    text += (text.empty() ? "'" : ", '") + parameter.name + "'";
  }
  return count > kShown ? text + " and " + std::to_string(count - kShown) + " more" : text;
}

bool is_in_names(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
         std::string_view("._-/:").find(c) != std::string_view::npos;
}

// What a pattern that fits nothing may have meant: a name behind that of a wrapper, a part of a
// name, or a regular expression.
std::string hint_for(const Layout& layout, const std::string& pattern) {
  std::string around = "*";
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char next = i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    const bool any = pattern[i] == '.' ? next == '*' : pattern[i] == '\\' && next != '.';
    if (is_in_names(pattern[i]) && !any) {
      around += pattern[i];
    } else if (around.back() != '*') {
      around += '*';
    }
    if (any) ++i;
  }
  if (around.back() != '*') around += '*';
  const std::string inner = pattern.substr(pattern.find('.') + 1);
  const bool wrapped = !inner.starts_with('*') && !names_like(layout, inner).empty();
  const std::string meant = wrapped ? inner : around;
  const std::string names = names_like(layout, meant);
  if (meant != "*" && !names.empty()) return "; did you mean '" + meant + "'? It fits " + names;
  return "; write names, or patterns in which * stands for anything; there are " +
         names_like(layout, "*");
}

std::vector<std::string> dense_patterns(const Layout& layout, const std::string& text) {
  std::istringstream words(text);
  std::vector<std::string> patterns{std::istream_iterator<std::string>(words), {}};
  for (const std::string& pattern : patterns) {
    if (names_like(layout, pattern).empty()) {
      throw std::invalid_argument("keep_dense: no parameter is called '" + pattern + "'" +
                                  hint_for(layout, pattern));
    }
  }
  return patterns;
}

constexpr int kFewRanks = 8;  // among more, what everyone sends to everyone is too much

// Where the search for a density starts, and the steps it takes: an eighth of an octave is 9 %.
constexpr double kStart = 0.03;
constexpr double kRungsPerOctave = 8;
constexpr int kLowestRung = 160;  // 1e-6

// To three digits, so that a density in a text is the same number.
double rounded(double share) {
  double unit = 1;
  while (share * unit < 100) unit *= 10;
  return std::round(share * unit) / unit;
}

bool is_one_number(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

ValueFormat to_values(std::string_view word) {
  const auto found = std::ranges::find(wire::kValueFormatNames, word);
  return static_cast<ValueFormat>(found - wire::kValueFormatNames.begin());
}

}  // namespace

Spec with_exchange(Spec method, int ranks) {
  if (method.name == "auto" && ranks > kFewRanks) method.settings.emplace("exchange", "ok_topk");
  return method;
}

Pipeline::Pipeline(const Layout& layout, const Spec& given) {
  const Method& method = find_method(given.name);
  const auto setting = [&](std::string_view name) -> std::string_view {
    const auto found = given.settings.find(name);
    return found == given.settings.end() ? std::string_view() : found->second;
  };

  const Spec exchange_spec = stage_spec(given, setting("exchange"), method.exchange, find_exchange);
  const ExchangeEntry& exchange_entry = find_exchange(exchange_spec.name);
  const Spec feedback_spec = stage_spec(given, setting("feedback"), method.feedback, find_feedback);
  const FeedbackEntry& feedback_entry = find_feedback(feedback_spec.name);
  choice = exchange_entry.choice;
  const bool alone = choice == Choice::alone;
  Spec select_spec;
  std::vector<Setting> known(common_settings().begin(), common_settings().end());
  known.insert(known.end(), exchange_entry.settings.begin(), exchange_entry.settings.end());
  known.insert(known.end(), feedback_entry.settings.begin(), feedback_entry.settings.end());
  if (alone) {
    const bool buckets = setting("granularity") != "model";
    std::string_view fallback = buckets ? method.select_bucket : method.select_model;
    if (fallback.empty()) fallback = buckets ? "carried" : "topk";
    select_spec = stage_spec(given, setting("select"), fallback, find_select);
    const SelectEntry& entry = find_select(select_spec.name);
    known.insert(known.end(), entry.settings.begin(), entry.settings.end());
    if (buckets && entry.granularity == Granularity::model) {
      throw std::invalid_argument(given.name + ": select=" + select_spec.name +
                                  " needs granularity=model; with buckets use select=carried");
    }
  } else if (!setting("select").empty()) {
    throw std::invalid_argument(
        given.name + ": exchange " + exchange_spec.name +
        " decides itself what is sent; leave out select=" + std::string(setting("select")));
  }

  for (Setting& each : known) {
    if (each.name == "density") each.fallback = method.density;
  }
  const Settings settings(given.name, known, given);
  const std::string& wanted_density = settings.text("density");
  if (wanted_density == "auto") {
    rule = Rule::found;
    density = method.exchange == std::string_view("arc_topk") ? 0.2 : kStart;
  } else if (is_one_number(wanted_density)) {
    density = settings.number("density");
  } else {
    rule = Rule::replayed;
    density = 0.5;  // some
  }
  least_density = settings.number("min_density");
  most_density = settings.number("max_density");
  if (least_density > most_density) {
    throw std::invalid_argument(given.name + ": min_density=" + settings.text("min_density") +
                                " is more than max_density=" + settings.text("max_density"));
  }
  if (exchange_entry.choice == Choice::everything) {
    if (!setting("density").empty() && rule == Rule::fixed && density != 1) {
      throw std::invalid_argument(
          given.name + ": sends everything; leave out density=" + std::string(setting("density")));
    }
    density = 1;
    rule = Rule::fixed;
  }
  granularity = settings.text("granularity") == "model" ? Granularity::model : Granularity::bucket;
  constexpr double kEntriesPerMb = (1 << 20) / sizeof(float);
  bucket_entries = granularity == Granularity::model
                       ? std::numeric_limits<std::size_t>::max()
                       : static_cast<std::size_t>(settings.number("bucket_cap_mb") * kEntriesPerMb);
  const std::string encoding = settings.text("values");
  const bool coarse = density < 1 && feedback_spec.name != "none";
  values = encoding != "auto" ? to_values(encoding)
           : coarse           ? ValueFormat::int4
                              : ValueFormat::fp32;
  compare = settings.text("compare") == "on";
  native = settings.text("reduce") == "native";
  if (native && alone) {
    throw std::invalid_argument(given.name +
                                ": reduce=native is for exchanges that need no more "
                                "than an all-reduce (dense, randk, arc_topk), not for " +
                                exchange_spec.name);
  }
  if (native && encoding != "auto" && encoding != "fp32") {
    throw std::invalid_argument(given.name +
                                ": reduce=native adds up in fp32; leave out values=" + encoding);
  }
  if (native) values = ValueFormat::fp32;
  unremembered = encoding != "auto" ? wire::without_scales(values) : ValueFormat::fp32;
  warmup_steps = settings.integer("warmup_steps");
  ramp_steps = settings.integer("ramp_steps");
  seed = settings.integer("seed");
  search = {.overhead = settings.number("overhead"),
            .ramp_overhead = settings.number("ramp_overhead"),
            .warmup_steps = warmup_steps,
            .ramp_steps = ramp_steps,
            .most_bytes = settings.number("budget_bytes")};
  if (rule == Rule::replayed) replay = tuning::Choices::parse(wanted_density, values);
  threads = std::make_unique<Threads>(settings.integer("threads"));

  const auto patterns = dense_patterns(layout, settings.text("keep_dense"));
  std::vector<Parameter> chosen, whole;
  for (const Parameter& parameter : layout.parameters()) {
    const bool keep = std::ranges::any_of(
        patterns, [&](const std::string& pattern) { return matches(pattern, parameter.name); });
    auto& home = keep ? whole : chosen;
    places.push_back({keep ? Place::Home::dense : Place::Home::compressed, home.size()});
    home.push_back(parameter);
  }
  compressed = Layout(std::move(chosen));
  uncompressed = Layout(std::move(whole));
  if (std::max(compressed.size(), uncompressed.size()) > std::numeric_limits<Index>::max()) {
    throw std::invalid_argument(given.name +
                                ": a model of more than 2^32 entries is not supported");
  }

  feedback = make(feedback_entry, feedback_spec, compressed, choice);
  exchange = make(exchange_entry, exchange_spec, compressed, choice);
  if (alone) selector = make(find_select(select_spec.name), select_spec, compressed, choice);
  if (exchange->needs_whole_model() && granularity != Granularity::model) {
    throw std::invalid_argument(given.name + ": exchange " + to_string(exchange_spec) +
                                " chooses over the whole model; it needs granularity=model");
  }

  spec = complete(given, common_settings());
  spec.settings["density"] = rule == Rule::fixed && density == 1 ? "1" : settings.text("density");
  spec.settings["feedback"] = to_string(complete(feedback_spec, feedback_entry.settings));
  spec.settings["exchange"] = to_string(complete(exchange_spec, exchange_entry.settings));
  if (alone) {
    spec.settings["select"] =
        to_string(complete(select_spec, find_select(select_spec.name).settings));
  }
  std::erase_if(spec.settings,
                [](const auto& item) { return !lists(common_settings(), item.first); });
}

bool Pipeline::works_on(const Device& device) const {
  if (choice == Choice::together) return native && device.adds_up();
  return !selector || selector->works_on_device(budget_at(0, 1).exchanges);
}

tuning::Level Pipeline::level_at(std::uint64_t step) const {
  if (rule == Rule::replayed) return replay.at(step);
  if (rule == Rule::found) {
    if (search.most_bytes > 0) return {least_density, values};  // up from there
    return {warmup_steps + ramp_steps > 0 ? 1 : density, values};
  }
  if (step < warmup_steps) return {1, values};
  const std::uint64_t into = step - warmup_steps;
  if (into >= ramp_steps) return {density, values};
  const double done = static_cast<double>(into + 1) / static_cast<double>(ramp_steps + 1);
  return {std::pow(density, done), values};
}

std::vector<tuning::Rung> Pipeline::ladder(int ranks) const {
  // Of so many entries that rounding plays no part: shards of different sizes must find the same.
  constexpr double kEntries = 1e6;
  const auto bytes = [&](double share) {
    const auto cost = exchange->cost(share * kEntries, kEntries, ranks);
    const double bits =
        cost.values * wire::bits_per_value(values) + cost.indices * wire::bits_per_index(share);
    return bits / 8;
  };
  const double dense_values = 2 * kEntries * (ranks - 1) / ranks;
  const auto whole = [&](ValueFormat format) {
    return dense_values * wire::bits_per_value(format) / 8;
  };
  const bool any_format = spec.name == "auto" && spec.settings.at("values") == "auto" && !native;
  if (ranks == 1) return {{{1, any_format ? ValueFormat::fp32 : values}, 0}};
  std::vector<tuning::Rung> rungs;
  const auto add = [&](const tuning::Level& level, double cost) {
    if (level.density < least_density || level.density > most_density) return;
    if (rungs.empty() || cost > rungs.back().bytes) rungs.push_back({level, cost});
  };
  for (int i = kLowestRung; i > 0; --i) {
    const double share = rounded(std::exp2(-i / kRungsPerOctave));
    if (bytes(share) < whole(values)) add({share, values}, bytes(share));
  }
  add({1, values}, whole(values));
  if (any_format) {
    for (const ValueFormat format : {ValueFormat::int8, ValueFormat::bf16, ValueFormat::fp32}) {
      add({1, format}, whole(format));
    }
  }
  if (rungs.empty()) rungs.push_back({{most_density, values}, bytes(most_density)});
  return rungs;
}

Budget Pipeline::budget_at(std::uint64_t step, double share) const {
  const std::size_t n = compressed.size();
  const auto wanted = static_cast<std::size_t>(std::llround(share * static_cast<double>(n)));
  return {.step = step,
          .seed = seed,
          .entries = std::clamp<std::size_t>(wanted, std::min<std::size_t>(1, n), n),
          .model = n,
          .density = share,
          .exchanges =
              granularity == Granularity::model ? Budget::Exchanges::one : Budget::Exchanges::many};
}

}  // namespace topreduce
