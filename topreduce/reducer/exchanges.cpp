// An open step until its vote: gradients come, and complete buckets are exchanged.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "topreduce/reducer/impl.h"

namespace topreduce {
namespace {

using Home = Pipeline::Place::Home;

// The largest entries, over the number of ranks: far enough from the largest float (2^128) that
// sums of all ranks, sums on top of what is remembered, and means times a loss scale stay finite.
constexpr double kLargestSum = 0x1p102;
// The largest gradients, over the number of ranks: so much smaller that what is remembered does not
// come near the largest sum. It would stay there, since every further step would be refused.
constexpr double kLargestGradient = 0x1p90;
constexpr double kUsualLossScale = 0x1p24;

// Values that may be on their way before further buckets wait, but for one bucket.
constexpr double kMostInFlight = 0x1p23;

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
  opened_at = last_added = std::chrono::steady_clock::now();
  any_started = false;
  worked_meanwhile = 0;
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

void Reducer::Impl::go_on() {
  if (pipeline.granularity == Granularity::bucket) start_complete_buckets();
  progress();
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
    if (Segment* segment = started_segment(id)) segment->mean = held[id].mean;
  }
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

// As they come, in any order. When more is under way than memory should hold, only the first of the
// plan that has not ended may start: that one all ranks start, or have ended, so it will end. The
// transport's own all-reduce all ranks must call in the same order.
void Reducer::Impl::start_complete_buckets() {
  for (std::size_t b = first_not_started; b < plan.count(); ++b) {
    if (started[b] == 0 && missing_of[b] == 0 && may_start(b)) {
      started[b] = 1;
      start(b);
    }
    if (b == first_not_started && started[b] != 0) ++first_not_started;
  }
}

bool Reducer::Impl::may_start(std::size_t index) {
  if (pipeline.native) return index == first_not_started;
  if (weight_in_flight < kMostInFlight) return true;
  while (first_not_ended < index && started[first_not_ended] != 0 &&
         buckets[2 * first_not_ended]->task.done() &&
         buckets[2 * first_not_ended + 1]->task.done()) {
    ++first_not_ended;
  }
  return index == first_not_ended;
}

void Reducer::Impl::start(std::size_t index) {
  for (const std::size_t id : plan[index]) {
    const Pipeline::Place place = pipeline.places[id];
    const bool dense_home = place.home == Home::dense;
    const Parameter& parameter =
        (dense_home ? pipeline.uncompressed : pipeline.compressed)[place.parameter];
    holder_of(id).segments.push_back({.parameter = place.parameter,
                                      .offset = parameter.offset,
                                      .count = parameter.size,
                                      .number = id,
                                      .gradient = held[id].gradient,
                                      .lent = held[id].lent,
                                      .mean = held[id].mean,
                                      .most = held[id].most});
  }
  exchange(*buckets[2 * index]);
  exchange(*buckets[2 * index + 1]);
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

CompensatedGradient Reducer::Impl::compensated(const Bucket& bucket) const {
  const bool restarts = regime == Regime::dense && pipeline.feedback->is_estimate();
  const bool remembers = bucket.home == Home::compressed && regime != Regime::bypass && !restarts;
  if (on_device) {
    const bool owes = remembers && pipeline.feedback->has_base();
    return {bucket.segments, *device, owes ? Device::Base::owed : Device::Base::none,
            1 / loss_scale};
  }
  const std::span<const float> base =
      remembers ? pipeline.feedback->base() : std::span<const float>();
  const float scale = remembers ? pipeline.feedback->scale() : 1;
  return {bucket.segments, base, scale / loss_scale,
          remembers ? pipeline.feedback->drift() : Drift(), threads()};
}

// While gradients still come, the cores are busy computing them.
Threads& Reducer::Impl::threads() const {
  return missing == 0 ? *pipeline.threads : Threads::none();
}

feedback::Feedback& Reducer::Impl::memory(const Bucket& bucket) {
  const bool remembers = bucket.home == Home::compressed && regime != Regime::bypass;
  return remembers ? *pipeline.feedback : *none;
}

// Whether what this rank brings is finite, and so small that nothing made of it overflows.
bool Reducer::Impl::is_sound(const Bucket& bucket, const CompensatedGradient& sight) {
  const double scale = std::max(1.0, loss_scale / kUsualLossScale);
  const auto limit = [&](double most) { return static_cast<float>(most / scale / comm->size()); };
  const float of_gradients = limit(kLargestGradient);
  if (!bucket.summary.within(limit(kLargestSum))) return false;
  const bool small = bucket.summary.within(of_gradients);
  if (sight.plain() || sight.device() != nullptr) return small;
  if (small && !memory(bucket).keeps_gradients()) return true;
  return sight.summarize_gradients().within(of_gradients);
}

// Values that an exchange sends, or about as many.
double Reducer::Impl::weight_of(const Bucket& bucket, const exchange::Exchange& by) const {
  const bool chosen = pipeline.selector && &by == pipeline.exchange.get();
  if (chosen) return static_cast<double>(bucket.selected.size());
  const auto size = static_cast<double>(bucket.sight->size());
  const auto model = static_cast<double>(std::max<std::size_t>(1, budget.model));
  const double k = static_cast<double>(budget.entries) * size / model;
  return std::min(size, by.cost(k, size, comm->size()).values);
}

void Reducer::Impl::exchange(Bucket& bucket) {
  if (bucket.segments.empty()) return;
  bucket.arrange();
  const CompensatedGradient& sight = bucket.sight.emplace(compensated(bucket));
  const bool whole = bucket.home == Home::dense || regime != Regime::compress;
  const bool alone = !whole && pipeline.selector != nullptr;
  // Tells afterwards what it saw: so it need not stop for that.
  const bool adds_up = on_device && pipeline.native && device->adds_up();
  double looked = 0, chosen = 0;
  {
    Stopwatch watch(chosen);
    sight.open();
    if (alone) {
      // Counts of a handful vary by more than `resize` foresees.
      bucket.selected.reserve(std::min<std::size_t>(sight.size(), 64));
      pipeline.selector->choose(sight, bucket.selected, bucket.summary, looked);
      if (!bucket.summary.finite()) bucket.selected.clear();
    } else if (!adds_up) {
      Stopwatch look(looked);
      bucket.summary = sight.summarize();
    }
  }
  if (!adds_up) sound = is_sound(bucket, sight) && sound;
  running[Stage::look] += looked;
  running[Stage::choose] += chosen - looked;

  // Coarse values are for those who remember what rounding took.
  const feedback::Feedback& feedback = memory(bucket);
  const bool remembers = feedback.is_estimate() || feedback.has_base();
  const bool chosen_format = regime == Regime::dense && pipeline.rule != Pipeline::Rule::fixed;
  const wire::ValueFormat values = chosen_format ? level.values : pipeline.values;
  const exchange::Subject subject{.exchange = bucket.number(),
                                  .run = run,
                                  .step = step,
                                  .parameters = bucket.contents(),
                                  .values = remembers ? values : pipeline.unremembered,
                                  .native = pipeline.native};
  bucket.channel.open(*comm, subject, sight, running, workspace);
  bucket.task = (whole ? *dense : *pipeline.exchange)
                    .run(sight, bucket.selected, budget, bucket.channel, bucket.result);
  if (in_flight.empty()) in_flight_since = Clock::now();
  if (!any_started) first_started = in_flight_since;
  any_started = true;
  in_flight.push_back(&bucket);
  bucket.weight = weight_of(bucket, whole ? *dense : *pipeline.exchange);
  weight_in_flight += bucket.weight;
  bucket.task.start();
  if (adds_up) {
    bucket.task.rethrow();
    bucket.summary = sight.summarize();
    sound = is_sound(bucket, sight) && sound;
  }
}

// Lets exchanges go on whose messages have come.
void Reducer::Impl::progress() {
  {
    Stopwatch watch(running[Stage::network]);
    comm->poll();
  }
  for (Bucket* bucket : in_flight) {
    while (bucket->channel.ready()) bucket->channel.resume(threads());
    bucket->task.rethrow();
  }
  const bool busy = !in_flight.empty();
  std::erase_if(in_flight, [&](Bucket* bucket) {
    if (!bucket->task.done()) return false;
    weight_in_flight -= bucket->weight;
    // While others are awaited this takes no time; after the vote it would.
    if (may_settle_early(*bucket)) settle(*bucket);
    return true;
  });
  if (busy && in_flight.empty()) {
    const auto time = Clock::now() - in_flight_since;
    running.seconds_exchanging += std::chrono::duration<double>(time).count();
  }
  Stopwatch watch(running[Stage::network]);
  comm->flush();
  last_looked = Clock::now();
}

void Reducer::Impl::wait_for_all() {
  comm->start_waiting();
  for (;;) {
    const std::uint64_t known = comm->version();
    start_complete_buckets();
    const std::size_t before = in_flight.size();
    progress();
    if (in_flight.empty() && first_not_started == plan.count()) return;
    if (in_flight.empty() || in_flight.size() < before) continue;  // others may start
    Stopwatch watch(running[Stage::network]);
    comm->check_peers();
    comm->wait_for_any(known);
  }
}
}  // namespace topreduce
