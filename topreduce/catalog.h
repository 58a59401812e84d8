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
#include "topreduce/methods.h"
#include "topreduce/select/selector.h"
#include "topreduce/spec.h"

// Every method and every stage, with its meaning and its parameters. catalog.def is the list; the
// C++ and Python faces, the command line, the documentation and the law tests all read it from
// here.

namespace topreduce {

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

std::span<const FeedbackEntry> feedbacks();
std::span<const SelectEntry> selectors();
std::span<const ExchangeEntry> exchanges();

/// The entry called `name`; otherwise std::invalid_argument with the nearest and the known ones.
const FeedbackEntry& find_feedback(std::string_view name);
const SelectEntry& find_select(std::string_view name);
const ExchangeEntry& find_exchange(std::string_view name);

}  // namespace topreduce
