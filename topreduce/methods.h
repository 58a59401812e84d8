#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "topreduce/api.h"

// What there is to choose from: methods, the stages they are made of, and their settings.

namespace topreduce {

/// A setting: its meaning, its default, and what it may be.
struct Setting {
  enum class Kind { number, integer, choice, text, density };
  std::string_view name;
  Kind kind;
  std::string_view fallback;  ///< the default, as a user would write it
  double low = 0;             ///< numbers: the range, both ends included ...
  double high = 0;
  bool above_low = false;    ///< ... or without its lower end
  std::string_view choices;  ///< choices: the words, separated by '|'
  std::string_view meaning;
};

/// Which cuts of the model into exchanges an entry can work with.
enum class Granularity { model, bucket, any };

/// A published pipeline: which stage stands where unless the user says otherwise.
struct Method {
  std::string_view name;
  std::string_view summary;
  std::string_view feedback;
  std::string_view select_model;   ///< with granularity "model"; empty if all ranks choose together
  std::string_view select_bucket;  ///< with granularity "bucket"
  std::string_view exchange;
  std::string_view density;  ///< unless the user says otherwise
  std::string_view paper;
};

/// A stage that can take the place of a method's own.
struct StageInfo {
  std::string_view kind;  ///< the setting that names it: "feedback", "select" or "exchange"
  std::string_view name;
  std::string_view summary;
  std::span<const Setting> settings;
};

TOPREDUCE_API std::span<const Method> methods();
TOPREDUCE_API std::vector<StageInfo> stages();
/// Settings that every method takes.
TOPREDUCE_API std::span<const Setting> common_settings();

/// The method called `name`; otherwise std::invalid_argument with the nearest and the known ones.
TOPREDUCE_API const Method& find_method(std::string_view name);

}  // namespace topreduce
