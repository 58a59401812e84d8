#include "topreduce/pipeline.h"

#include <algorithm>
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

std::vector<std::string> dense_patterns(const Layout& layout, const std::string& text) {
  std::istringstream words(text);
  std::vector<std::string> patterns{std::istream_iterator<std::string>(words), {}};
  for (const std::string& pattern : patterns) {
    const auto fits = [&](const Parameter& parameter) { return matches(pattern, parameter.name); };
    if (std::ranges::none_of(layout.parameters(), fits)) {
      throw std::invalid_argument("keep_dense: no parameter is called '" + pattern + "'");
    }
  }
  return patterns;
}

ValueFormat to_values(std::string_view word) {
  const auto found = std::ranges::find(wire::kValueFormatNames, word);
  return static_cast<ValueFormat>(found - wire::kValueFormatNames.begin());
}

}  // namespace

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

  const Settings settings(given.name, known, given);
  density = settings.number("density");
  if (exchange_entry.choice == Choice::everything) {
    if (!setting("density").empty() && density != 1) {
      throw std::invalid_argument(
          given.name + ": sends everything; leave out density=" + std::string(setting("density")));
    }
    density = 1;
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
  spec.settings["density"] = density == 1 ? "1" : spec.settings["density"];
  spec.settings["feedback"] = to_string(complete(feedback_spec, feedback_entry.settings));
  spec.settings["exchange"] = to_string(complete(exchange_spec, exchange_entry.settings));
  if (alone) {
    spec.settings["select"] =
        to_string(complete(select_spec, find_select(select_spec.name).settings));
  }
  std::erase_if(spec.settings,
                [](const auto& item) { return !lists(common_settings(), item.first); });
}

bool Pipeline::works_on_device() const {
  if (choice == Choice::together) return false;
  return !selector || selector->works_on_device(budget_at(0).exchanges);
}

double Pipeline::density_at(std::uint64_t step) const {
  if (step < warmup_steps) return 1;
  const std::uint64_t into = step - warmup_steps;
  if (into >= ramp_steps) return density;
  return std::pow(density, static_cast<double>(into + 1) / static_cast<double>(ramp_steps + 1));
}

Budget Pipeline::budget_at(std::uint64_t step) const {
  const std::size_t n = compressed.size();
  const double share = density_at(step);
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
