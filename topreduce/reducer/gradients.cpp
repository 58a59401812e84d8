// A step opens, and gradients come; what is complete is exchanged (exchanges.cpp).

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "topreduce/reducer/impl.h"

namespace topreduce {
namespace {

using Home = Pipeline::Place::Home;

void expect_entries(const char* caller, std::size_t given, std::size_t wanted) {
  if (given == wanted) return;
  throw std::invalid_argument(std::string(caller) + ": the gradient has " + std::to_string(given) +
                              " entries, its parameters have " + std::to_string(wanted));
}

}  // namespace

Regime Reducer::Impl::regime_of_step() const {
  if (mode == Mode::bypass) return Regime::bypass;
  if (!pipeline.feedback->started()) return Regime::dense;
  if (pipeline.rule != Pipeline::Rule::fixed) {
    return level.everything() ? Regime::dense : Regime::compress;
  }
  if (step < pipeline.warmup_steps) return Regime::dense;
  if (step >= pipeline.warmup_steps + pipeline.ramp_steps) return Regime::compress;
  // Early in the ramp sending everything may be cheaper; it is never worse.
  const auto n = static_cast<double>(pipeline.compressed.size());
  const auto k = static_cast<double>(pipeline.budget_at(step, level.density).entries);
  const auto cost = pipeline.exchange->cost(k, n, comm->size());
  const auto whole = dense->cost(n, n, comm->size());
  const double of_value = wire::bits_per_value(pipeline.values);
  const double bits = cost.values * of_value + cost.indices * wire::bits_per_index(k / n);
  return bits < whole.values * of_value ? Regime::compress : Regime::dense;
}

void Reducer::Impl::expect_open(const char* caller) const {
  if (comm != nullptr) return;
  const std::string why = dropped.empty() ? "; call begin first"
                                          : ": step " + std::to_string(step) + " was dropped (" +
                                                dropped + "); begin it again";
  throw std::invalid_argument(std::string(caller) + ": no step is open" + why);
}

void Reducer::Impl::expect_closed(const char* caller) const {
  if (comm == nullptr) return;
  throw std::invalid_argument(std::string(caller) + ": a step is open; finish or abandon it first");
}

void Reducer::Impl::begin(Communicator& communicator, float scale) {
  if (in_parts) {
    throw std::runtime_error("begin: a commit or a load was broken off around step " +
                             std::to_string(step) +
                             ", so part of the memory is of another step; load a state");
  }
  if (!(scale >= 0) || !std::isfinite(scale)) {
    throw std::invalid_argument("begin: loss_scale must be a positive number, not " +
                                std::to_string(scale));
  }
  communicator.enter({comm::Place::Kind::step, step});
  joint.enter(step);
  comm = &communicator;
  dropped.clear();
  ranks = comm->size();
  voting = false;
  doubt.reset();
  rebuilding.reset();
  late_mean = {};
  traffic_before = comm->traffic();
  knows_scale = scale > 0;
  loss_scale = knows_scale ? scale : 1;
  opened_at = last_added = last_ended = std::chrono::steady_clock::now();
  any_started = false;
  worked = worked_meanwhile = 0;
  level = next_level();
  const Regime last = std::exchange(regime, regime_of_step());
  if (regime != last) buckets.clear();  // a dense step's buffers are as large as the model
  budget = pipeline.budget_at(step, level.density);
  if (regime != Regime::compress) budget.entries = budget.model;
  running = {};
  running.step = step;
  running.density = level.density;
  running.entries = layout.size();
  running.budget = budget.entries + pipeline.uncompressed.size();
  vote.begin(layout.count(), comm->size());
  sound = true;
  parameters_seen.reset();
  in_flight.clear();
  weight_in_flight = 0;
  std::ranges::fill(added, 0);
  arrivals.clear();
  missing = layout.count();
  missing_of.resize(plan.count());
  for (std::size_t b = 0; b < plan.count(); ++b) missing_of[b] = plan[b].size();
  started.assign(plan.count(), 0);
  first_not_started = first_not_ended = 0;
  buckets.resize(2 * plan.count());
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    if (!buckets[i]) buckets[i] = std::make_unique<Bucket>();
    buckets[i]->open(i % 2 == 0 ? Home::compressed : Home::dense);
  }
  if (regime == Regime::compress) {
    if (pipeline.selector) pipeline.selector->begin(budget);
    pipeline.exchange->begin(budget);
  }
}

// Checks a bucket and marks its parameters; returns how many entries they have.
std::size_t Reducer::Impl::mark_added(const char* caller, std::span<const std::size_t> parameters) {
  expect_open(caller);
  std::size_t size = 0;
  for (const std::size_t id : parameters) {
    if (id >= layout.count()) {
      throw std::invalid_argument(std::string(caller) + ": there is no parameter " +
                                  std::to_string(id) + "; the layout has " +
                                  std::to_string(layout.count()));
    }
    if (added[id]++ != 0) {
      throw std::invalid_argument(std::string(caller) + ": parameter '" + layout[id].name +
                                  "' was added twice in step " + std::to_string(step));
    }
    size += layout[id].size;
    arrivals.push_back(id);
    --missing;
    --missing_of[plan.bucket_of(id)];
  }
  return size;
}

void Reducer::Impl::add(const char* caller, std::span<const std::size_t> parameters,
                        std::span<float> gradient, float most, bool lent) {
  if (!(most > 0)) {
    throw std::invalid_argument(std::string(caller) + ": most must be a positive number, not " +
                                std::to_string(most));
  }
  const std::size_t size = mark_added(caller, parameters);
  if (!on_device) expect_entries(caller, gradient.size(), size);
  std::size_t start = 0;
  for (const std::size_t id : parameters) {
    held[id] = {on_device ? gradient : gradient.subspan(start, layout[id].size), most, lent, {}};
    start += layout[id].size;
  }
  note_gradient();
  if (pipeline.granularity != Granularity::bucket) return;
  start_complete_buckets();
  if (last_added - last_looked >= pace) progress();
}

void Reducer::Impl::deliver_to(std::span<const std::size_t> parameters, std::span<float> means) {
  expect_open("deliver_to");
  std::size_t size = 0;
  for (const std::size_t id : parameters) {
    if (id >= layout.count() || added[id] == 0 || !held[id].lent) {
      throw std::invalid_argument(
          "deliver_to: parameter " +
          (id < layout.count() ? "'" + layout[id].name + "'" : std::to_string(id)) +
          " was not lent in step " + std::to_string(step));
    }
    size += layout[id].size;
  }
  expect_entries("deliver_to", means.size(), size);
  for (const std::size_t id : parameters) {
    held[id].mean = means.first(layout[id].size);
    means = means.subspan(layout[id].size);
    if (Segment* segment = started_segment(id)) {
      segment->mean = held[id].mean;
      holder_of(id).handed_out.reset();
    }
  }
  for (const auto& bucket : buckets) hand_out_early(*bucket);
}

// Null: its bucket has not started.
Segment* Reducer::Impl::started_segment(std::size_t parameter) {
  if (started[plan.bucket_of(parameter)] == 0) return nullptr;
  return &*std::ranges::lower_bound(holder_of(parameter).segments, parameter, {}, &Segment::number);
}

void Reducer::Impl::relocate(std::span<const std::size_t> parameters, std::span<float> gradient) {
  expect_open("relocate");
  if (on_device) throw std::invalid_argument("relocate: gradients stay on the device");
  std::size_t size = 0;
  for (const std::size_t id : parameters) {
    if (id >= layout.count() || added[id] == 0 || held[id].lent) {
      throw std::invalid_argument(
          "relocate: parameter " +
          (id < layout.count() ? "'" + layout[id].name + "'" : std::to_string(id)) +
          " was not added in step " + std::to_string(step));
    }
    size += layout[id].size;
  }
  expect_entries("relocate", gradient.size(), size);
  for (const std::size_t id : parameters) {
    held[id].gradient = gradient.first(layout[id].size);
    gradient = gradient.subspan(layout[id].size);
    if (Segment* segment = started_segment(id)) segment->gradient = held[id].gradient;
  }
}

Bucket& Reducer::Impl::holder_of(std::size_t parameter) {
  const bool dense_home = pipeline.places[parameter].home == Home::dense;
  return *buckets[2 * plan.bucket_of(parameter) + (dense_home ? 1 : 0)];
}

void Reducer::Impl::participate(const Participation& participation) {
  expect_open("participate");
  for (const std::size_t id : participation.unused) {
    if (id >= layout.count()) {
      throw std::invalid_argument("participate: there is no parameter " + std::to_string(id) +
                                  "; the layout has " + std::to_string(layout.count()));
    }
  }
  vote.note(participation);
}

}  // namespace topreduce
