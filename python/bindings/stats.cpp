#include "topreduce/stats.h"

#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bindings.h"

namespace nb = nanobind;
using topreduce::StepStats;

namespace {

nb::dict seconds(const StepStats& stats) {
  nb::dict by_stage;
  for (std::size_t i = 0; i < topreduce::kStageNames.size(); ++i) {
    by_stage[std::string(topreduce::kStageNames[i]).c_str()] = stats.seconds[i];
  }
  return by_stage;
}

}  // namespace

void bind_stats(nb::module_& module) {
  // One list names the fields; `as_dict` reads it back, so the two cannot differ.
  static nb::list* fields = new nb::list();
  auto stats = nb::class_<StepStats>(module, "StepStats", "What one step cost this rank.");
  const auto field = [&](const char* name, auto member, const char* meaning) {
    stats.def_ro(name, member, meaning);
    fields->append(name);
  };
  field("step", &StepStats::step, "Number of the step, from 0.");
  field("entries", &StepStats::entries, "Entries in the model.");
  field("density", &StepStats::density, "Share of the entries that each rank was to send.");
  field("budget", &StepStats::budget, "Entries that each rank meant to send.");
  field("selected", &StepStats::selected, "Entries that this rank sent.");
  field("delivered", &StepStats::delivered, "Entries of the sum that everyone applies.");
  field("bytes_sent", &StepStats::bytes_sent, "Bytes that this rank sent.");
  field("bytes_received", &StepStats::bytes_received, "Bytes that this rank received.");
  field("messages", &StepStats::messages, "Messages that this rank sent.");
  field("bytes_inside", &StepStats::bytes_inside,
        "Bytes that this rank sent to those with other parts of the model.");
  field("messages_inside", &StepStats::messages_inside, "Messages to them.");
  field("rounds", &StepStats::rounds,
        "How often messages went out and were waited for, in all exchanges and the vote.");
  field("kept_energy", &StepStats::kept_energy,
        "1 - |owed + gradient - settled|^2 / |owed + gradient|^2.");
  field("owed_norm", &StepStats::owed_norm, "Norm of what this rank owes after the step.");
  field("seconds_exchanging", &StepStats::seconds_exchanging,
        "Seconds in which exchanges were under way.");
  field("seconds_exposed", &StepStats::seconds_exposed, "Of these, after the last gradient.");
  field("seconds_computed", &StepStats::seconds_computed,
        "Seconds from the start of the step to its last gradient.");
  field("seconds_waited", &StepStats::seconds_waited,
        "Seconds from then until the means were there.");
  field("finite", &StepStats::finite,
        "False: some rank had an infinity or NaN; nothing was committed.");
  stats.def_prop_ro("seconds", &seconds,
                    nb::for_getter(nb::sig("def seconds(self) -> dict[str, float]")),
                    "Seconds by stage, in the order the data flows.");
  fields->append("seconds");
  stats.def("__repr__", [](nb::handle self) {
    std::string words;
    for (nb::handle name : *fields) {
      words += (words.empty() ? "" : ", ") + nb::cast<std::string>(name) + "=" +
               nb::repr(nb::getattr(self, name)).c_str();
    }
    return "StepStats(" + words + ")";
  });
  stats.def(
      "as_dict",
      [](nb::handle self) {
        nb::dict dict;
        for (nb::handle name : *fields) dict[name] = nb::getattr(self, name);
        return dict;
      },
      nb::sig("def as_dict(self) -> dict[str, object]"), "The same as a plain dict.");
}
