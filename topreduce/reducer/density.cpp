// How much each step sends: by the settings, or found while running from what the steps take.

#include <algorithm>
#include <stdexcept>

#include "topreduce/reducer/impl.h"

namespace topreduce {
namespace {

double seconds_between(std::chrono::steady_clock::time_point from,
                       std::chrono::steady_clock::time_point to) {
  return std::max(0.0, std::chrono::duration<double>(to - from).count());
}

}  // namespace

// So many ranks are there, which may be others than before.
void Reducer::Impl::prepare_for(int size) {
  if (size == prepared_ranks) return;
  prepared_ranks = size;
  if (given.name == "auto") configure({});
  start_search();
}

// The ladder depends on the settings and the number of ranks; the place on it lasts.
void Reducer::Impl::start_search() {
  if (pipeline.rule != Pipeline::Rule::found || prepared_ranks == 0) {
    controller.reset();
    return;
  }
  const tuning::Level start = coming ? coming->level : pipeline.level_at(0);
  controller.emplace(pipeline.ladder(prepared_ranks), 0, pipeline.search);
  controller->resume(start, coming && coming->settled);
  measured = {};
}

tuning::Level Reducer::Impl::next_level() const {
  if (mode == Mode::bypass) return {1, wire::ValueFormat::fp32};
  if (controller) return controller->level();
  if (pipeline.rule == Pipeline::Rule::found && coming) return coming->level;
  return pipeline.level_at(step);
}

// The step is committed.
void Reducer::Impl::note_density() {
  for (std::uint64_t known = choices.steps(); known <= step; ++known) choices.append(level);
  if (!controller || !vote_measured) return;
  controller->note(measured.step, measured.level, *vote_measured);
  coming = {controller->level(), controller->settled()};
}

void Reducer::Impl::note_gradient() {
  last_added = std::chrono::steady_clock::now();
  worked_meanwhile = worked;
}

void Reducer::Impl::time_step(std::uint64_t number) {
  const auto now = std::chrono::steady_clock::now();
  finished_at = now;
  stats.seconds_computed = seconds_between(opened_at, last_added);
  stats.seconds_waited = seconds_between(last_added, now);
  measured = {
      number,
      level,
      {.computed = stats.seconds_computed,
       .waited = stats.seconds_waited,
       .exchanging = stats.seconds_exchanging,
       .overlap = any_started ? seconds_between(first_started, last_added) : 0,
       .bytes = static_cast<double>(stats.bytes_sent),
       .busy = controller ? worked_meanwhile * processors.taken_by_work(processors.share()) : 0}};
}

void Reducer::Impl::timed(double computed, double waited) {
  if (comm != nullptr) throw std::invalid_argument("timed: a step is open; finish it first");
  if (!(computed >= 0) || !(waited >= 0)) {
    throw std::invalid_argument("timed: seconds must be positive numbers");
  }
  stats.seconds_computed = measured.taken.computed = computed;
  stats.seconds_waited = measured.taken.waited = waited;
}

void Reducer::Impl::timed_since(std::chrono::steady_clock::time_point last) {
  timed(seconds_between(last, last_added), stats.seconds_waited);
}

void Reducer::Impl::visit_density(StateVisitor& visitor) {
  if (visitor.purpose() == StateVisitor::Purpose::save) {
    std::string text = choices.text(), following = tuning::to_word(next_level());
    if (controller && controller->settled()) following += " settled";
    visitor.text("choices", text);
    visitor.text("next", following);
    return;
  }
  std::string text, following;
  visitor.text("choices", text);
  visitor.text("next", following);
  tuning::Choices loaded = tuning::Choices::parse(text, pipeline.values);
  std::optional<Next> loaded_next;
  if (!following.empty()) {
    const std::size_t end = following.find(" settled");
    const auto level_text = tuning::Choices::parse(following.substr(0, end), pipeline.values);
    loaded_next = {level_text.at(0), end != std::string::npos};
  }
  if (visitor.purpose() != StateVisitor::Purpose::load) return;
  choices = std::move(loaded);
  choices.cut(step);
  coming = loaded_next;
  start_search();
}

}  // namespace topreduce
