// The order of a step, and nothing else of it:
//
//   begin    open the transaction
//   add      look, choose, exchange            each bucket that is complete, while others still
//   finish   look, choose, exchange            compute; or once, for the whole model
//            vote, commit, decode              all of it, or nothing
//
// Until the vote only `parcels` are written: what is owed and the caller's gradients stay as they
// are.

#include "topreduce/reducer.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "topreduce/agreement.h"
#include "topreduce/bucket_plan.h"
#include "topreduce/fingerprint.h"
#include "topreduce/floating.h"
#include "topreduce/joint_vote.h"
#include "topreduce/parcel.h"
#include "topreduce/pipeline.h"
#include "topreduce/state_range.h"
#include "topreduce/version.h"
#include "topreduce/vote.h"
#include "topreduce/wire/checksum.h"
#include "topreduce/wire/little_endian.h"

namespace topreduce {
namespace {

using Home = Pipeline::Place::Home;

// How a step treats the compressed parameters.
enum class Regime { compress, dense, bypass };

// The largest entries, over the number of ranks: far enough from the largest float (2^128) that
// sums of all ranks, sums on top of what is remembered, and means times a loss scale stay finite.
constexpr double kLargestSum = 0x1p102;
// The largest gradients, over the number of ranks: so much smaller that what is remembered does not
// come near the largest sum. It would stay there, since every further step would be refused.
constexpr double kLargestGradient = 0x1p90;
constexpr double kUsualLossScale = 0x1p24;

// Values that may be on their way before further buckets wait, but for one bucket.
constexpr double kMostUnderWay = 0x1p23;

void expect_entries(const char* caller, std::size_t given, std::size_t wanted) {
  if (given == wanted) return;
  throw std::invalid_argument(std::string(caller) + ": the gradient has " + std::to_string(given) +
                              " entries, its parameters have " + std::to_string(wanted));
}

}  // namespace

struct TOPREDUCE_INSIDE Reducer::Inside {
  Inside(Layout whole, const Spec& method)
      : layout(std::move(whole)), given(method), pipeline(layout, method) {
    introduce();
    added.assign(layout.count(), 0);
    held.resize(layout.count());
    forget_order();
  }

  // Settings changed: the ranks must agree anew.
  void introduce() {
    Spec shown = pipeline.spec;
    shown.settings.erase("threads");  // each rank's own affair
    if (mode == Mode::bypass) shown.name += ", bypassed";
    description = "topreduce " + std::string(version()) + "\n" + describe(layout, shown);
    run = Fingerprint().add(description).value();
    agreed_ranks = 0;
  }

  // The method or the device changes: moves what is owed to where it must live. If it cannot,
  // nothing has changed.
  void settle_down(feedback::Feedback& kept, const Pipeline& next, Device* wanted) {
    Device* const home = next.works_on_device() ? wanted : nullptr;
    on_device = kept.move_to(home) && home != nullptr;
    device = wanted;
  }

  // How the model is cut into buckets.
  void forget_order();
  void agree_on_order(Communicator& communicator);
  void plan_buckets();

  void begin(Communicator& communicator, float scale);
  void add(std::span<const std::size_t> parameters, std::span<float> gradient, float most);
  void relocate(std::span<const std::size_t> parameters, std::span<float> gradient);
  void attend(const Attendance& attendance);
  void finish();
  void abandon() noexcept;

  void expect_closed(const char* caller) const;
  std::size_t take_note(std::span<const std::size_t> parameters);
  Parcel& parcel_of(std::size_t parameter);
  void start_complete_buckets();
  bool may_start(std::size_t bucket);
  void go_on();
  void start(std::size_t bucket);
  Regime regime_of_step() const;
  Pending pending(const Parcel& parcel) const;
  feedback::Feedback& memory(const Parcel& parcel);
  Threads& threads() const;
  bool is_sound(const Parcel& parcel, const Pending& sight);
  double weight_of(const Parcel& parcel, const exchange::Exchange& by) const;
  void exchange(Parcel& parcel);
  void progress();
  void wait_for_all();
  void hold_vote();
  std::uint32_t fingerprint_of_sums() const;
  bool fits_callers();
  void take_back(Parcel& parcel, const Segment& segment);
  int divisor_of(const feedback::Feedback& kept) const;
  float unit_of(const feedback::Feedback& kept) const;
  void leave_out_unused(Parcel& parcel);
  void commit();
  void spoil();

  Layout layout;
  Spec given;
  Pipeline pipeline;
  std::unique_ptr<exchange::Exchange> dense = find_exchange("dense").make({"dense", {}, {}}, {});
  std::unique_ptr<feedback::Feedback> none = find_feedback("none").make({"none", {}, {}}, {});
  Device* device = nullptr;
  bool on_device = false;  // gradients and what is owed
  Mode mode = Mode::compress;
  std::uint64_t step = 0;
  bool in_parts = false;  // a commit or a load was broken off
  std::string description;
  std::uint32_t run = 0;  // its fingerprint, in every message
  int agreed_ranks = 0;   // ranks that were asked; 0: nobody yet
  StepStats stats;
  std::vector<std::size_t> everything;  // the numbers of all parameters, for `average`

  // The order that buckets follow: reversed, until a step has been finished and so observed; that
  // of rank 0 then, agreed upon at the next `begin`.
  enum class Order { reversed, observed, agreed } order_is = Order::reversed;
  std::vector<std::size_t> order;
  BucketPlan plan;
  Bytes order_bytes;

  // The open step.
  Communicator* comm = nullptr;
  comm::Traffic traffic_before;
  float loss_scale = 1;
  bool knows_scale = true;
  Regime regime = Regime::compress;
  Budget budget;
  exchange::Workspace workspace;
  StepVote vote;
  JointVote joint;
  bool sound = true;  // all that this rank brought so far is finite
  // What the caller handed over of a parameter.
  struct Held {
    std::span<float> gradient;
    float most = 0;
  };
  std::vector<char> added;            // per parameter of the layout
  std::vector<Held> held;             // the same
  std::vector<std::size_t> arrivals;  // parameters, in the order they were added
  std::size_t missing = 0;
  std::vector<std::size_t> missing_of;  // the same by bucket
  std::vector<char> started;            // the same
  std::size_t first_not_started = 0;    // bucket, in the order of the plan
  std::size_t first_not_ended = 0;      // of those that this was asked of
  // Two for each bucket, compressed and kept; reused.
  std::vector<std::unique_ptr<Parcel>> parcels;
  std::vector<Parcel*> under_way;  // whose exchange has not ended
  double weight_under_way = 0;     // values that they send
  std::chrono::steady_clock::time_point under_way_since;
  StepStats running;
};

// ---- opening -----------------------------------------------------------------------------------

Regime Reducer::Inside::regime_of_step() const {
  if (mode == Mode::bypass) return Regime::bypass;
  if (step < pipeline.warmup_steps || !pipeline.feedback->started()) return Regime::dense;
  if (step >= pipeline.warmup_steps + pipeline.ramp_steps) return Regime::compress;
  // Early in the ramp sending everything may be cheaper; it is never worse.
  const auto n = static_cast<double>(pipeline.compressed.size());
  const auto k = static_cast<double>(pipeline.budget_at(step).entries);
  const auto cost = pipeline.exchange->cost(k, n, comm->size());
  const auto whole = dense->cost(n, n, comm->size());
  const double of_value = wire::bits_per_value(pipeline.values);
  const double bits = cost.values * of_value + cost.indices * wire::bits_per_index(k / n);
  return bits < whole.values * of_value ? Regime::compress : Regime::dense;
}

void Reducer::Inside::expect_closed(const char* caller) const {
  if (comm == nullptr) return;
  throw std::invalid_argument(std::string(caller) + ": a step is open; finish or abandon it first");
}

// Others may join who have seen no step: all start as they do.
void Reducer::Inside::forget_order() {
  order = reverse_order(layout);
  order_is = Order::reversed;
  plan_buckets();
}

void Reducer::Inside::agree_on_order(Communicator& communicator) {
  if (order_is != Order::observed || pipeline.granularity == Granularity::model) return;
  order_bytes.resize(order.size() * sizeof(std::uint32_t));
  for (std::size_t i = 0; i < order.size(); ++i) {
    wire::store(order_bytes.data() + i * sizeof(std::uint32_t),
                static_cast<std::uint32_t>(order[i]));
  }
  communicator.enter({comm::Place::Kind::agree, step});
  communicator.broadcast(order_bytes, 0);
  std::vector<std::size_t> heard(order.size());
  for (std::size_t i = 0; i < heard.size(); ++i) {
    heard[i] = wire::load<std::uint32_t>(order_bytes.data() + i * sizeof(std::uint32_t));
  }
  if (!is_order(heard, layout.count())) {
    throw WireError("step " + std::to_string(step) + ": rank 0 sent no order of the parameters");
  }
  order = std::move(heard);
  order_is = Order::agreed;
  plan_buckets();
}

void Reducer::Inside::plan_buckets() {
  plan = BucketPlan(layout, order, pipeline.bucket_entries);
}

void Reducer::Inside::begin(Communicator& communicator, float scale) {
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
  traffic_before = comm->traffic();
  knows_scale = scale > 0;
  loss_scale = knows_scale ? scale : 1;
  const Regime last = std::exchange(regime, regime_of_step());
  if (regime != last) parcels.clear();  // a dense step's buffers are as large as the model
  budget = pipeline.budget_at(step);
  if (regime != Regime::compress) budget.entries = budget.model;
  running = {};
  running.step = step;
  running.entries = layout.size();
  running.budget = budget.entries + pipeline.kept.size();
  vote.begin(layout.count(), comm->size());
  sound = true;
  under_way.clear();
  weight_under_way = 0;
  std::ranges::fill(added, 0);
  arrivals.clear();
  missing = layout.count();
  missing_of.resize(plan.count());
  for (std::size_t b = 0; b < plan.count(); ++b) missing_of[b] = plan[b].size();
  started.assign(plan.count(), 0);
  first_not_started = first_not_ended = 0;
  parcels.resize(2 * plan.count());
  for (std::size_t i = 0; i < parcels.size(); ++i) {
    if (!parcels[i]) parcels[i] = std::make_unique<Parcel>();
    parcels[i]->open(i % 2 == 0 ? Home::compressed : Home::kept);
  }
  if (regime == Regime::compress) {
    if (pipeline.selector) pipeline.selector->begin(budget);
    pipeline.exchange->begin(budget);
  }
}

// ---- buckets -----------------------------------------------------------------------------------

// Checks a bucket and marks its parameters; returns how many entries they have.
std::size_t Reducer::Inside::take_note(std::span<const std::size_t> parameters) {
  if (comm == nullptr) throw std::invalid_argument("add: no step is open; call begin first");
  std::size_t size = 0;
  for (const std::size_t id : parameters) {
    if (id >= layout.count()) {
      throw std::invalid_argument("add: there is no parameter " + std::to_string(id) +
                                  "; the layout has " + std::to_string(layout.count()));
    }
    if (added[id]++ != 0) {
      throw std::invalid_argument("add: parameter '" + layout[id].name +
                                  "' was added twice in step " + std::to_string(step));
    }
    size += layout[id].size;
    arrivals.push_back(id);
    --missing;
    --missing_of[plan.bucket_of(id)];
  }
  return size;
}

void Reducer::Inside::add(std::span<const std::size_t> parameters, std::span<float> gradient,
                          float most) {
  if (!(most > 0)) {
    throw std::invalid_argument("add: most must be a positive number, not " + std::to_string(most));
  }
  const std::size_t size = take_note(parameters);
  if (!on_device) expect_entries("add", gradient.size(), size);
  std::size_t start = 0;
  for (const std::size_t id : parameters) {
    held[id] = {on_device ? gradient : gradient.subspan(start, layout[id].size), most};
    start += layout[id].size;
  }
  if (pipeline.granularity == Granularity::bucket) go_on();
}

void Reducer::Inside::go_on() {
  if (pipeline.granularity == Granularity::bucket) start_complete_buckets();
  progress();
}

void Reducer::Inside::relocate(std::span<const std::size_t> parameters, std::span<float> gradient) {
  if (comm == nullptr) throw std::invalid_argument("relocate: no step is open");
  if (on_device) throw std::invalid_argument("relocate: gradients stay on the device");
  std::size_t size = 0;
  for (const std::size_t id : parameters) {
    if (id >= layout.count() || added[id] == 0) {
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
    if (started[plan.bucket_of(id)] == 0) continue;
    std::vector<Segment>& segments = parcel_of(id).segments;
    std::ranges::lower_bound(segments, id, {}, &Segment::number)->gradient = held[id].gradient;
  }
}

Parcel& Reducer::Inside::parcel_of(std::size_t parameter) {
  const bool kept = pipeline.places[parameter].home == Home::kept;
  return *parcels[2 * plan.bucket_of(parameter) + (kept ? 1 : 0)];
}

// As they come, in any order. When more is under way than memory should hold, only the first of the
// plan that has not ended may start: that one all ranks start, or have ended, so it will end. The
// transport's own all-reduce all ranks must call in the same order.
void Reducer::Inside::start_complete_buckets() {
  for (std::size_t b = first_not_started; b < plan.count(); ++b) {
    if (started[b] == 0 && missing_of[b] == 0 && may_start(b)) {
      started[b] = 1;
      start(b);
    }
    if (b == first_not_started && started[b] != 0) ++first_not_started;
  }
}

bool Reducer::Inside::may_start(std::size_t bucket) {
  if (pipeline.native) return bucket == first_not_started;
  if (weight_under_way < kMostUnderWay) return true;
  while (first_not_ended < bucket && started[first_not_ended] != 0 &&
         parcels[2 * first_not_ended]->task.done() &&
         parcels[2 * first_not_ended + 1]->task.done()) {
    ++first_not_ended;
  }
  return bucket == first_not_ended;
}

void Reducer::Inside::start(std::size_t bucket) {
  for (const std::size_t id : plan[bucket]) {
    const Pipeline::Place place = pipeline.places[id];
    const bool kept = place.home == Home::kept;
    const Parameter& parameter = (kept ? pipeline.kept : pipeline.compressed)[place.parameter];
    parcel_of(id).segments.push_back({.parameter = place.parameter,
                                      .offset = parameter.offset,
                                      .count = parameter.size,
                                      .number = id,
                                      .gradient = held[id].gradient,
                                      .most = held[id].most});
  }
  exchange(*parcels[2 * bucket]);
  exchange(*parcels[2 * bucket + 1]);
}

void Reducer::Inside::attend(const Attendance& attendance) {
  if (comm == nullptr) throw std::invalid_argument("attend: no step is open; call begin first");
  for (const std::size_t id : attendance.unused) {
    if (id >= layout.count()) {
      throw std::invalid_argument("attend: there is no parameter " + std::to_string(id) +
                                  "; the layout has " + std::to_string(layout.count()));
    }
  }
  vote.note(attendance);
}

Pending Reducer::Inside::pending(const Parcel& parcel) const {
  const bool restarts = regime == Regime::dense && pipeline.feedback->is_estimate();
  const bool remembers = parcel.home == Home::compressed && regime != Regime::bypass && !restarts;
  if (on_device) {
    const bool owes = remembers && pipeline.feedback->has_base();
    return {parcel.segments, *device, owes ? Device::Base::owed : Device::Base::none,
            1 / loss_scale};
  }
  const std::span<const float> base =
      remembers ? pipeline.feedback->base() : std::span<const float>();
  const float scale = remembers ? pipeline.feedback->scale() : 1;
  return {parcel.segments, base, scale / loss_scale,
          remembers ? pipeline.feedback->drift() : Drift(), threads()};
}

// While gradients still come, the cores are busy computing them.
Threads& Reducer::Inside::threads() const {
  return missing == 0 ? *pipeline.threads : Threads::none();
}

feedback::Feedback& Reducer::Inside::memory(const Parcel& parcel) {
  const bool remembers = parcel.home == Home::compressed && regime != Regime::bypass;
  return remembers ? *pipeline.feedback : *none;
}

// Whether what this rank brings is finite, and so small that nothing made of it overflows.
bool Reducer::Inside::is_sound(const Parcel& parcel, const Pending& sight) {
  const double scale = std::max(1.0, loss_scale / kUsualLossScale);
  const auto limit = [&](double most) { return static_cast<float>(most / scale / comm->size()); };
  const float of_gradients = limit(kLargestGradient);
  if (!parcel.seen.within(limit(kLargestSum))) return false;
  const bool small = parcel.seen.within(of_gradients);
  if (sight.plain() || sight.device() != nullptr) return small;
  if (small && !memory(parcel).keeps_gradients()) return true;
  return sight.survey_gradients().within(of_gradients);
}

// Values that an exchange sends, or about as many.
double Reducer::Inside::weight_of(const Parcel& parcel, const exchange::Exchange& by) const {
  const bool chosen = pipeline.selector && &by == pipeline.exchange.get();
  if (chosen) return static_cast<double>(parcel.selected.size());
  const auto size = static_cast<double>(parcel.sight->size());
  const auto model = static_cast<double>(std::max<std::size_t>(1, budget.model));
  const double k = static_cast<double>(budget.entries) * size / model;
  return std::min(size, by.cost(k, size, comm->size()).values);
}

void Reducer::Inside::exchange(Parcel& parcel) {
  if (parcel.segments.empty()) return;
  parcel.arrange();
  const Pending& sight = parcel.sight.emplace(pending(parcel));
  const bool whole = parcel.home == Home::kept || regime != Regime::compress;
  double looked = 0, chosen = 0;
  {
    Stopwatch watch(chosen);
    sight.open();
    if (whole || !pipeline.selector) {
      Stopwatch look(looked);
      parcel.seen = sight.survey();
    } else {
      // Counts of a handful vary by more than `resize` foresees.
      parcel.selected.reserve(std::min<std::size_t>(sight.size(), 64));
      pipeline.selector->choose(sight, parcel.selected, parcel.seen, looked);
      if (!parcel.seen.finite()) parcel.selected.clear();
    }
  }
  sound = is_sound(parcel, sight) && sound;
  running[Stage::look] += looked;
  running[Stage::choose] += chosen - looked;

  // Coarse values are for those who remember what rounding took.
  const feedback::Feedback& kept = memory(parcel);
  const bool remembers = kept.is_estimate() || kept.has_base();
  const exchange::Subject subject{.exchange = parcel.number(),
                                  .run = run,
                                  .step = step,
                                  .parameters = parcel.contents(),
                                  .values = remembers ? pipeline.values : pipeline.unremembered,
                                  .native = pipeline.native};
  parcel.channel.open(*comm, subject, sight, running, workspace);
  parcel.task = (whole ? *dense : *pipeline.exchange)
                    .run(sight, parcel.selected, budget, parcel.channel, parcel.delivery);
  if (under_way.empty()) under_way_since = std::chrono::steady_clock::now();
  under_way.push_back(&parcel);
  parcel.weight = weight_of(parcel, whole ? *dense : *pipeline.exchange);
  weight_under_way += parcel.weight;
  parcel.task.start();
  Stopwatch watch(running[Stage::network]);
  comm->flush();
}

// Lets exchanges go on whose messages have come.
void Reducer::Inside::progress() {
  {
    Stopwatch watch(running[Stage::network]);
    comm->poll();
  }
  for (Parcel* parcel : under_way) {
    while (parcel->channel.ready()) parcel->channel.resume(threads());
    parcel->task.rethrow();
  }
  const bool busy = !under_way.empty();
  std::erase_if(under_way, [&](const Parcel* parcel) {
    if (parcel->task.done()) weight_under_way -= parcel->weight;
    return parcel->task.done();
  });
  if (busy && under_way.empty()) {
    const auto time = std::chrono::steady_clock::now() - under_way_since;
    running.seconds_exchanging += std::chrono::duration<double>(time).count();
  }
  Stopwatch watch(running[Stage::network]);
  comm->flush();
}

void Reducer::Inside::wait_for_all() {
  for (;;) {
    const std::uint64_t seen = comm->version();
    start_complete_buckets();
    const std::size_t before = under_way.size();
    progress();
    if (under_way.empty() && first_not_started == plan.count()) return;
    if (under_way.empty() || under_way.size() < before) continue;  // others may start
    Stopwatch watch(running[Stage::network]);
    comm->check_peers();
    comm->wait_for_any(seen);
  }
}

// ---- closing -----------------------------------------------------------------------------------

void Reducer::Inside::finish() {
  if (comm == nullptr) throw std::invalid_argument("finish: no step is open; call begin first");
  if (missing != 0) {
    std::string names;
    for (std::size_t id = 0, shown = 0; id < layout.count() && shown < 5; ++id) {
      if (added[id] == 0) names += (shown++ == 0 ? "" : ", ") + layout[id].name;
    }
    throw std::invalid_argument("finish: step " + std::to_string(step) + " is missing " +
                                std::to_string(missing) + " of " + std::to_string(layout.count()) +
                                " parameters: " + names);
  }
  wait_for_all();
  hold_vote();
  {
    Stopwatch watch(running[Stage::commit]);
    running.finite = vote.finite() && fits_callers();
  }
  running.finite = joint.hold(step, running.finite, running);
  {
    Stopwatch watch(running[Stage::commit]);
    running.finite ? commit() : spoil();
  }
  const comm::Traffic traffic = comm->traffic();
  running.bytes_sent = traffic.bytes_sent - traffic_before.bytes_sent;
  running.bytes_received = comm->bytes_received_here();
  running.messages = traffic.messages - traffic_before.messages;
  comm->settle();
  stats = running;
  comm = nullptr;
  if (order_is == Order::reversed) {
    order = arrivals;
    order_is = Order::observed;
  }
}

std::uint32_t Reducer::Inside::fingerprint_of_sums() const {
  std::uint64_t sums = 0;  // buckets come in any order
  for (const auto& parcel : parcels) {
    const exchange::Delivery& delivery = parcel->delivery;
    const auto hash = [](const auto& values) {
      return wire::xxh64(std::as_bytes(std::span(values)), 0);
    };
    sums += hash(delivery.sum.indices) ^ hash(delivery.sum.values) ^ hash(delivery.dense_sum);
  }
  return static_cast<std::uint32_t>(sums >> 32 ^ sums) | 1;
}

void Reducer::Inside::hold_vote() {
  StepVote::Ballot ballot{
      .run = run, .step = step, .finite = sound, .loss_scale = knows_scale ? loss_scale : 0};
  for (const auto& parcel : parcels) {
    if (parcel->segments.empty()) continue;
    ballot.finite = ballot.finite && parcel->channel.finite();
    // Ranks that decide on what is handed out must multiply by the same.
    ballot.one_scale = ballot.one_scale || parcel->narrow();
  }
  if (pipeline.compare) ballot.sums = fingerprint_of_sums();
  Stopwatch watch(running[Stage::network]);
  running.rounds += vote.hold(ballot, *comm);
  if (!knows_scale && vote.loss_scale() > 0) loss_scale = vote.loss_scale();
}

// Whether callers can use what they would be handed: sums, divisor and loss scale are the same on
// all ranks, so their answers are. If there is a loss scale, it must be lowered. Without one, a
// debt that grew too large for a caller would be in the way for ever: what is too much stays owed.
bool Reducer::Inside::fits_callers() {
  for (const auto& owner : parcels) {
    Parcel& parcel = *owner;
    const feedback::Feedback& kept = memory(parcel);
    for (const Segment& segment : parcel.segments) {
      if (!segment.narrow() || !vote.used(segment.number)) continue;
      const float largest = kept.largest_mean(pending(parcel), segment, parcel.delivery,
                                              divisor_of(kept), unit_of(kept));
      if (largest <= segment.most) continue;
      if (loss_scale != 1 || !kept.takes_back() || !std::isfinite(largest)) return false;
      take_back(parcel, segment);
    }
  }
  return true;
}

// Cuts the sums of a segment to what its caller can use; each rank owes an even part of the rest.
void Reducer::Inside::take_back(Parcel& parcel, const Segment& segment) {
  const feedback::Feedback& kept = memory(parcel);
  exchange::Delivery& delivery = parcel.delivery;
  const auto divisor = static_cast<float>(divisor_of(kept)), unit = unit_of(kept);
  const auto ranks = static_cast<float>(comm->size());
  // The largest sum that becomes no larger mean than `most`.
  float most = segment.most / unit * divisor;
  while (most / divisor * unit > segment.most) most = std::nextafter(most, 0.0f);
  const auto cut = [&](float& sum) {
    const float before = sum;
    sum = std::clamp(sum, -most, most);
    return (before - sum) / ranks;
  };
  const std::size_t begin = segment.start, end = segment.start + segment.size();
  if (delivery.extent == exchange::Delivery::Extent::whole) {
    if (delivery.dense_settled.empty()) {
      delivery.dense_settled.resize(delivery.dense_sum.size());
      pending(parcel).evaluate(delivery.dense_settled);
    }
    for (std::size_t i = begin; i < end; ++i) {
      delivery.dense_settled[i] -= cut(delivery.dense_sum[i]);
    }
    return;
  }
  std::array<SparseVector, 2> settled;
  for (std::size_t i = 0; i < delivery.sum.size(); ++i) {
    const Index place = delivery.sum.indices[i];
    if (place < begin || place >= end) continue;
    const float back = cut(delivery.sum.values[i]);
    if (back != 0) settled[1].push_back(place, -back);
  }
  settled[0].assign(delivery.settled);
  workspace.adder.add(settled, pending(parcel).size(), delivery.settled);
}

// An estimate stays a mean over all ranks; only what is handed out is divided otherwise.
int Reducer::Inside::divisor_of(const feedback::Feedback& kept) const {
  return kept.is_estimate() ? comm->size() : vote.divisor();
}

float Reducer::Inside::unit_of(const feedback::Feedback& kept) const {
  const float present = static_cast<float>(comm->size()) / static_cast<float>(vote.divisor());
  return kept.is_estimate() ? loss_scale * present : loss_scale;
}

// What nobody used is not delivered: whatever was exchanged of it stays owed.
void Reducer::Inside::leave_out_unused(Parcel& parcel) {
  const bool whole = parcel.delivery.extent == exchange::Delivery::Extent::whole;
  std::erase_if(parcel.segments, [&](const Segment& segment) {
    if (vote.used(segment.number)) return false;
    const auto& places = parcel.delivery.sum.indices;
    const auto first = std::ranges::lower_bound(places, segment.start);
    const auto last =
        std::ranges::lower_bound(places, static_cast<Index>(segment.start + segment.size()));
    running.delivered -= whole ? segment.size() : static_cast<std::size_t>(last - first);
    return true;
  });
}

void Reducer::Inside::commit() {
  in_parts = true;
  double energy = 0, gone = 0;
  for (const auto& owner : parcels) {
    Parcel& parcel = *owner;
    if (parcel.segments.empty()) continue;
    const bool whole = parcel.delivery.extent == exchange::Delivery::Extent::whole;
    running.selected +=
        whole || !pipeline.selector ? parcel.delivery.delivered() : parcel.selected.size();
    running.delivered += parcel.delivery.delivered();
    energy += parcel.seen.energy;
    if (!vote.all_used()) leave_out_unused(parcel);
    if (parcel.segments.empty()) continue;
    feedback::Feedback& kept = memory(parcel);
    gone += kept.commit(pending(parcel), parcel.delivery, divisor_of(kept), unit_of(kept));
  }
  if (regime == Regime::compress) {
    if (pipeline.selector) pipeline.selector->commit();
    pipeline.exchange->commit();
  }
  if (energy > 0) {
    running.kept_energy = std::clamp(gone / energy, 0.0, 1.0);
    const bool owes = regime != Regime::bypass && pipeline.feedback->has_base();
    running.owed_norm = owes ? std::sqrt(std::max(0.0, energy - gone)) : 0;
  }
  ++step;
  in_parts = false;
}

// As in plain DDP, everyone sees that the step is lost.
void Reducer::Inside::spoil() {
  for (const auto& owner : parcels) {
    Parcel& parcel = *owner;
    if (on_device) device->spoil(parcel.segments);
    for (const Segment& segment : parcel.segments) {
      std::ranges::fill(segment.gradient, std::numeric_limits<float>::quiet_NaN());
    }
  }
}

void Reducer::Inside::abandon() noexcept {
  under_way.clear();
  for (const auto& parcel : parcels) {
    if (parcel) parcel->task = {};
  }
  // Once an exchange has started, peers may have heard of it, even if not from this rank.
  const bool begun = std::ranges::find(started, char{1}) != started.end();
  if (comm != nullptr && !begun) comm->leave();
  if (comm != nullptr) joint.leave();  // nothing is said there before the vote
  comm = nullptr;
}

// ---- the face ----------------------------------------------------------------------------------

Reducer::Reducer(Layout layout, const Spec& method)
    : inside_(std::make_unique<Inside>(std::move(layout), method)) {}
Reducer::Reducer(Layout layout, std::string_view method)
    : Reducer(std::move(layout), parse_spec(method)) {}
Reducer::~Reducer() = default;
Reducer::Reducer(Reducer&&) noexcept = default;
Reducer& Reducer::operator=(Reducer&&) noexcept = default;

void Reducer::agree(Communicator& comm) {
  inside_->expect_closed("agree");
  comm.enter({comm::Place::Kind::agree, inside_->step});
  expect_same_text(comm, "step " + std::to_string(inside_->step) + "\n" + inside_->description);
  inside_->agreed_ranks = comm.size();
  inside_->forget_order();
}

void Reducer::commit_with(Communicator* others) {
  inside_->expect_closed("commit_with");
  inside_->joint.join(others);
}

void Reducer::begin(Communicator& comm, float loss_scale) {
  const FloatMode mode;
  inside_->expect_closed("begin");
  if (inside_->agreed_ranks != comm.size()) agree(comm);
  inside_->agree_on_order(comm);
  inside_->begin(comm, loss_scale);
}

void Reducer::add(std::span<const std::size_t> parameters, std::span<float> gradient, float most) {
  const FloatMode mode;
  try {
    if (inside_->on_device) {
      throw std::invalid_argument("add: gradients must stay on the device, see on_device");
    }
    inside_->add(parameters, gradient, most);
  } catch (...) {
    abandon();
    throw;
  }
}

void Reducer::add_on_device(std::span<const std::size_t> parameters, float most) {
  const FloatMode mode;
  try {
    if (!inside_->on_device) {
      throw std::invalid_argument("add: gradients must come to main memory, see on_device");
    }
    inside_->add(parameters, {}, most);
  } catch (...) {
    abandon();
    throw;
  }
}

void Reducer::relocate(std::span<const std::size_t> parameters, std::span<float> gradient) {
  try {
    inside_->relocate(parameters, gradient);
  } catch (...) {
    abandon();
    throw;
  }
}

void Reducer::use(Device* device) {
  if (inside_->comm != nullptr) throw std::invalid_argument("use: a step is open");
  inside_->settle_down(*inside_->pipeline.feedback, inside_->pipeline, device);
}

bool Reducer::progress() {
  if (inside_->comm == nullptr) return false;
  const FloatMode mode;
  try {
    inside_->go_on();
    return !inside_->under_way.empty();
  } catch (...) {
    abandon();
    throw;
  }
}

bool Reducer::on_device() const {
  return inside_->on_device;
}

void Reducer::attend(const Attendance& attendance) {
  inside_->attend(attendance);
}

const StepStats& Reducer::finish() {
  const FloatMode mode;
  try {
    inside_->finish();
  } catch (...) {
    abandon();
    throw;
  }
  return inside_->stats;
}

const StepStats& Reducer::average(Communicator& comm, std::span<float> gradient) {
  std::vector<std::size_t>& all = inside_->everything;
  if (all.empty()) {
    all.resize(inside_->layout.count());
    std::iota(all.begin(), all.end(), std::size_t{0});
  }
  begin(comm);
  add(all, gradient);
  return finish();
}

void Reducer::abandon() noexcept {
  inside_->abandon();
}

void Reducer::skip_to(std::uint64_t step) {
  if (inside_->comm != nullptr) throw std::invalid_argument("skip_to: a step is open");
  inside_->step = step;
}

void Reducer::configure(const Spec& changes) {
  Inside& now = *inside_;
  if (now.comm != nullptr) throw std::invalid_argument("configure: a step is open");
  Spec wanted = now.given;
  if (!changes.name.empty()) wanted.name = changes.name;
  for (const auto& [name, value] : changes.settings) wanted.settings[name] = value;
  Pipeline next(now.layout, wanted);
  const Spec &before = now.pipeline.spec, &after = next.spec;
  const auto same = [&](std::string_view name) {
    const auto a = before.settings.find(name), b = after.settings.find(name);
    return a != before.settings.end() && b != after.settings.end() && a->second == b->second;
  };
  if (!same("keep_dense") || !same("feedback")) {
    throw std::invalid_argument(
        "configure: feedback and keep_dense decide what is owed; they stay "
        "as they are once a run has begun");
  }
  // An estimate is kept in another form if the ranks choose alone; it owes nothing and starts anew.
  const bool form_changes =
      (next.choice == Choice::alone) != (now.pipeline.choice == Choice::alone);
  const bool keeps_memory = !(form_changes && next.feedback->is_estimate());
  // A device may refuse: so this comes before anything changes.
  now.settle_down(keeps_memory ? *now.pipeline.feedback : *next.feedback, next, now.device);
  if (keeps_memory) next.feedback = std::move(now.pipeline.feedback);
  if (same("threads")) next.threads = std::move(now.pipeline.threads);
  if (same("select")) next.selector = std::move(now.pipeline.selector);
  if (same("exchange")) next.exchange = std::move(now.pipeline.exchange);
  now.pipeline = std::move(next);
  now.plan_buckets();
  now.given = std::move(wanted);
  const bool own_affair =
      changes.name.empty() && changes.settings.size() == 1 && changes.settings.contains("threads");
  if (!own_affair) now.introduce();
}

void Reducer::set_mode(Mode mode) {
  if (inside_->comm != nullptr) throw std::invalid_argument("set_mode: a step is open");
  inside_->mode = mode;
  inside_->introduce();
}

Reducer::Mode Reducer::mode() const {
  return inside_->mode;
}
std::vector<std::vector<std::size_t>> Reducer::buckets() const {
  std::vector<std::vector<std::size_t>> all;
  for (std::size_t b = 0; b < inside_->plan.count(); ++b) {
    all.emplace_back(inside_->plan[b].begin(), inside_->plan[b].end());
  }
  return all;
}
const Layout& Reducer::layout() const {
  return inside_->layout;
}
const Layout& Reducer::remembered() const {
  return inside_->pipeline.compressed;
}
const Spec& Reducer::spec() const {
  return inside_->pipeline.spec;
}
const StepStats& Reducer::stats() const {
  return inside_->stats;
}
std::vector<std::size_t> Reducer::unused() const {
  std::vector<std::size_t> numbers;
  for (std::size_t id = 0; id < inside_->layout.count(); ++id) {
    if (!inside_->vote.used(id)) numbers.push_back(id);
  }
  return numbers;
}
std::uint64_t Reducer::step() const {
  return inside_->step;
}

double Reducer::density() const {
  return inside_->mode == Mode::bypass ? 1 : inside_->pipeline.density_at(inside_->step);
}

std::span<const float> Reducer::owed() const {
  return inside_->pipeline.feedback->owed();
}

void Reducer::visit(StateVisitor& visitor) {
  Inside& now = *inside_;
  if (now.comm != nullptr) throw std::invalid_argument("state: a step is open");
  const auto purpose = visitor.purpose();
  if (now.in_parts && purpose == StateVisitor::Purpose::save) {
    throw std::runtime_error("state: a commit or a load was broken off; load a state first");
  }
  now.in_parts = now.in_parts || purpose == StateVisitor::Purpose::load;
  auto step = static_cast<double>(now.step);
  visit_number(visitor, "step", step, state_range::kStep);
  now.step = static_cast<std::uint64_t>(step);
  now.pipeline.feedback->visit(visitor);
  if (now.pipeline.selector) now.pipeline.selector->visit(visitor);
  now.pipeline.exchange->visit(visitor);
  if (purpose == StateVisitor::Purpose::load) now.in_parts = false;
}

}  // namespace topreduce
