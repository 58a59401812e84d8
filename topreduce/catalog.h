#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "topreduce/exchange/exchange.h"
#include "topreduce/feedback/feedback.h"
#include "topreduce/layout.h"
#include "topreduce/select/selector.h"
#include "topreduce/spec.h"

// Every method and every stage, with its meaning and its parameters. catalog.def is the list; the
// C++ and Python faces, the command line, the documentation and the law tests all read it from
// here.

namespace topreduce {

/// A setting: its meaning, its default, and what it may be.
struct Setting {
  enum class Kind { number, integer, choice, text };
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

/// Who decides what an exchange sends.
enum class Choice { alone, together, everything };

/// Values of all settings of an entry: given, or by default; checked.
class Settings {
 public:
  /// Throws std::invalid_argument, naming `owner`, for a setting that `known` does not list and for
  /// a value outside its range.
  Settings(std::string_view owner, std::span<const Setting> known, const Spec& spec,
           Choice choice = Choice::alone);

  double number(std::string_view name) const;
  std::uint64_t integer(std::string_view name) const;
  const std::string& text(std::string_view name) const;

  /// Of the exchange in the same pipeline. Not `alone`: all ranks always send the same entries.
  Choice choice() const { return choice_; }

 private:
  Choice choice_;
  std::map<std::string, std::string, std::less<>> values_;
};

template <class Stage>
using Factory = std::unique_ptr<Stage> (*)(const Settings&, const Layout&);

/// One stage of a pipeline.
template <class Stage>
struct Entry {
  std::string_view name;
  Granularity granularity;
  std::string_view summary;
  std::vector<Setting> settings;
  Factory<Stage> make;
};

using FeedbackEntry = Entry<feedback::Feedback>;
using SelectEntry = Entry<select::Selector>;

struct ExchangeEntry : Entry<exchange::Exchange> {
  Choice choice;
};

/// A published pipeline: which stage stands where unless the user says otherwise.
struct Method {
  std::string_view name;
  std::string_view summary;
  std::string_view feedback;
  std::string_view select_model;   ///< with granularity "model"; empty if all ranks choose together
  std::string_view select_bucket;  ///< with granularity "bucket"
  std::string_view exchange;
  std::string_view paper;
};

std::span<const FeedbackEntry> feedbacks();
std::span<const SelectEntry> selectors();
std::span<const ExchangeEntry> exchanges();
std::span<const Method> methods();
/// Settings that every method takes.
std::span<const Setting> common_settings();

/// The entry called `name`; otherwise std::invalid_argument with the nearest and the known ones.
const FeedbackEntry& find_feedback(std::string_view name);
const SelectEntry& find_select(std::string_view name);
const ExchangeEntry& find_exchange(std::string_view name);
const Method& find_method(std::string_view name);

}  // namespace topreduce
