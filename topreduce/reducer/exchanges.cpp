// The exchanges of an open step: buckets that are complete start, and go on as messages come.

#include <algorithm>
#include <chrono>

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

}  // namespace

void Reducer::Impl::go_on() {
  if (pipeline.granularity == Granularity::bucket) start_complete_buckets();
  progress();
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
  CompensatedGradient sight(bucket.segments, base, scale / loss_scale,
                            remembers ? pipeline.feedback->drift() : Drift(), threads());
  if (bucket.taken_in) sight.taken_in();
  return sight;
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
  if (bucket.taken_in) return bucket.lent_in.seen().within(of_gradients);
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
  CompensatedGradient& sight = bucket.sight.emplace(compensated(bucket));
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
      const bool lets_go = pipeline.selector->lets_go() && may_settle_early(bucket);
      if (lets_go) {
        bucket.lent_in.open(memory(bucket), sight.scale());
        sight.let_go_to(bucket.lent_in);
      }
      pipeline.selector->choose(sight, bucket.selected, bucket.summary, looked);
      if (lets_go) sight.taken_in();
      bucket.taken_in = lets_go;
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
    if (may_settle_early(*bucket)) {
      settle(*bucket);
      hand_out_early(*bucket);
    }
    return true;
  });
  if (busy && in_flight.empty()) {
    last_ended = Clock::now();
    running.seconds_exchanging +=
        std::chrono::duration<double>(last_ended - in_flight_since).count();
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
