// The order of a step, and nothing else of it:
//
//   begin    open the transaction
//   add      look, choose, exchange            each bucket that is complete, while others still
//   finish   look, choose, exchange            compute; or once, for the whole model
//            vote, commit, decode              all of it, or nothing
//
// Until the vote only `buckets` are written: what is owed and the caller's gradients stay as they
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
#include "topreduce/bucket.h"
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

struct TOPREDUCE_LOCAL Reducer::Impl {
  Impl(Layout whole, const Spec& method)
      : layout(std::move(whole)), given(method), pipeline(layout, method) {
    describe_run();
    added.assign(layout.count(), 0);
    held.resize(layout.count());
    forget_order();
  }

  // Settings changed: the ranks must agree anew.
  void describe_run() {
    Spec shown = pipeline.spec;
    shown.settings.erase("threads");  // each rank's own affair
    if (mode == Mode::bypass) shown.name += ", bypassed";
    description = "topreduce " + std::string(version()) + "\n" + describe(layout, shown);
    run = Fingerprint().add(description).value();
    agreed_ranks = 0;
  }

  // The method or the device changes: moves what is owed to where it must live. If it cannot,
  // nothing has changed.
  void move_memory(feedback::Feedback& feedback, const Pipeline& next, Device* wanted) {
    Device* const home = next.works_on_device() ? wanted : nullptr;
    on_device = feedback.move_to(home) && home != nullptr;
    device = wanted;
  }

  // How the model is cut into buckets.
  void forget_order();
  void agree_on_order(Communicator& communicator);
  void plan_buckets();

  void begin(Communicator& communicator, float scale);
  void add(std::span<const std::size_t> parameters, std::span<float> gradient, float most);
  void relocate(std::span<const std::size_t> parameters, std::span<float> gradient);
  void participate(const Participation& participation);
  void finish();
  void abandon() noexcept;

  void expect_closed(const char* caller) const;
  std::size_t mark_added(std::span<const std::size_t> parameters);
  Bucket& holder_of(std::size_t parameter);
  void start_complete_buckets();
  bool may_start(std::size_t index);
  void go_on();
  void start(std::size_t index);
  Regime regime_of_step() const;
  CompensatedGradient compensated(const Bucket& bucket) const;
  feedback::Feedback& memory(const Bucket& bucket);
  Threads& threads() const;
  bool is_sound(const Bucket& bucket, const CompensatedGradient& sight);
  double weight_of(const Bucket& bucket, const exchange::Exchange& by) const;
  void exchange(Bucket& bucket);
  void progress();
  void wait_for_all();
  void hold_vote();
  std::uint32_t fingerprint_of_sums() const;
  bool fits_callers();
  void take_back(Bucket& bucket, const Segment& segment);
  int divisor_of(const feedback::Feedback& feedback) const;
  float unit_of(const feedback::Feedback& feedback) const;
  void leave_out_unused(Bucket& bucket);
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
  // Two for each bucket, compressed and dense; reused.
  std::vector<std::unique_ptr<Bucket>> buckets;
  std::vector<Bucket*> under_way;  // whose exchange has not ended
  double weight_under_way = 0;     // values that they send
  std::chrono::steady_clock::time_point under_way_since;
  StepStats running;
};

// ---- opening -----------------------------------------------------------------------------------

Regime Reducer::Impl::regime_of_step() const {
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

void Reducer::Impl::expect_closed(const char* caller) const {
  if (comm == nullptr) return;
  throw std::invalid_argument(std::string(caller) + ": a step is open; finish or abandon it first");
}

// Others may join who have seen no step: all start as they do.
void Reducer::Impl::forget_order() {
  order = reverse_order(layout);
  order_is = Order::reversed;
  plan_buckets();
}

void Reducer::Impl::agree_on_order(Communicator& communicator) {
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

void Reducer::Impl::plan_buckets() {
  plan = BucketPlan(layout, order, pipeline.bucket_entries);
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
  comm = &communicator;
  traffic_before = comm->traffic();
  knows_scale = scale > 0;
  loss_scale = knows_scale ? scale : 1;
  const Regime last = std::exchange(regime, regime_of_step());
  if (regime != last) buckets.clear();  // a dense step's buffers are as large as the model
  budget = pipeline.budget_at(step);
  if (regime != Regime::compress) budget.entries = budget.model;
  running = {};
  running.step = step;
  running.entries = layout.size();
  running.budget = budget.entries + pipeline.uncompressed.size();
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

// ---- buckets -----------------------------------------------------------------------------------

// Checks a bucket and marks its parameters; returns how many entries they have.
std::size_t Reducer::Impl::mark_added(std::span<const std::size_t> parameters) {
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

void Reducer::Impl::add(std::span<const std::size_t> parameters, std::span<float> gradient,
                          float most) {
  if (!(most > 0)) {
    throw std::invalid_argument("add: most must be a positive number, not " + std::to_string(most));
  }
  const std::size_t size = mark_added(parameters);
  if (!on_device) expect_entries("add", gradient.size(), size);
  std::size_t start = 0;
  for (const std::size_t id : parameters) {
    held[id] = {on_device ? gradient : gradient.subspan(start, layout[id].size), most};
    start += layout[id].size;
  }
  if (pipeline.granularity == Granularity::bucket) go_on();
}

void Reducer::Impl::go_on() {
  if (pipeline.granularity == Granularity::bucket) start_complete_buckets();
  progress();
}

void Reducer::Impl::relocate(std::span<const std::size_t> parameters, std::span<float> gradient) {
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
    std::vector<Segment>& segments = holder_of(id).segments;
    std::ranges::lower_bound(segments, id, {}, &Segment::number)->gradient = held[id].gradient;
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
  if (weight_under_way < kMostUnderWay) return true;
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
    const Parameter& parameter = (dense_home ? pipeline.uncompressed : pipeline.compressed)[place.parameter];
    holder_of(id).segments.push_back({.parameter = place.parameter,
                                      .offset = parameter.offset,
                                      .count = parameter.size,
                                      .number = id,
                                      .gradient = held[id].gradient,
                                      .most = held[id].most});
  }
  exchange(*buckets[2 * index]);
  exchange(*buckets[2 * index + 1]);
}

void Reducer::Impl::participate(const Participation& participation) {
  if (comm == nullptr) throw std::invalid_argument("participate: no step is open; call begin first");
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
  double looked = 0, chosen = 0;
  {
    Stopwatch watch(chosen);
    sight.open();
    if (whole || !pipeline.selector) {
      Stopwatch look(looked);
      bucket.summary = sight.summarize();
    } else {
      // Counts of a handful vary by more than `resize` foresees.
      bucket.selected.reserve(std::min<std::size_t>(sight.size(), 64));
      pipeline.selector->choose(sight, bucket.selected, bucket.summary, looked);
      if (!bucket.summary.finite()) bucket.selected.clear();
    }
  }
  sound = is_sound(bucket, sight) && sound;
  running[Stage::look] += looked;
  running[Stage::choose] += chosen - looked;

  // Coarse values are for those who remember what rounding took.
  const feedback::Feedback& feedback = memory(bucket);
  const bool remembers = feedback.is_estimate() || feedback.has_base();
  const exchange::Subject subject{.exchange = bucket.number(),
                                  .run = run,
                                  .step = step,
                                  .parameters = bucket.contents(),
                                  .values = remembers ? pipeline.values : pipeline.unremembered,
                                  .native = pipeline.native};
  bucket.channel.open(*comm, subject, sight, running, workspace);
  bucket.task = (whole ? *dense : *pipeline.exchange)
                    .run(sight, bucket.selected, budget, bucket.channel, bucket.result);
  if (under_way.empty()) under_way_since = std::chrono::steady_clock::now();
  under_way.push_back(&bucket);
  bucket.weight = weight_of(bucket, whole ? *dense : *pipeline.exchange);
  weight_under_way += bucket.weight;
  bucket.task.start();
  Stopwatch watch(running[Stage::network]);
  comm->flush();
}

// Lets exchanges go on whose messages have come.
void Reducer::Impl::progress() {
  {
    Stopwatch watch(running[Stage::network]);
    comm->poll();
  }
  for (Bucket* bucket : under_way) {
    while (bucket->channel.ready()) bucket->channel.resume(threads());
    bucket->task.rethrow();
  }
  const bool busy = !under_way.empty();
  std::erase_if(under_way, [&](const Bucket* bucket) {
    if (bucket->task.done()) weight_under_way -= bucket->weight;
    return bucket->task.done();
  });
  if (busy && under_way.empty()) {
    const auto time = std::chrono::steady_clock::now() - under_way_since;
    running.seconds_exchanging += std::chrono::duration<double>(time).count();
  }
  Stopwatch watch(running[Stage::network]);
  comm->flush();
}

void Reducer::Impl::wait_for_all() {
  for (;;) {
    const std::uint64_t known = comm->version();
    start_complete_buckets();
    const std::size_t before = under_way.size();
    progress();
    if (under_way.empty() && first_not_started == plan.count()) return;
    if (under_way.empty() || under_way.size() < before) continue;  // others may start
    Stopwatch watch(running[Stage::network]);
    comm->check_peers();
    comm->wait_for_any(known);
  }
}

// ---- closing -----------------------------------------------------------------------------------

void Reducer::Impl::finish() {
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
    running.finite ? commit() : spoil();
  }
  const comm::Traffic traffic = comm->traffic();
  running.bytes_sent = traffic.bytes_sent - traffic_before.bytes_sent;
  running.bytes_received = comm->bytes_received_here();
  running.messages = traffic.messages - traffic_before.messages;
  comm->drain();
  stats = running;
  comm = nullptr;
  if (order_is == Order::reversed) {
    order = arrivals;
    order_is = Order::observed;
  }
}

std::uint32_t Reducer::Impl::fingerprint_of_sums() const {
  std::uint64_t sums = 0;  // buckets come in any order
  for (const auto& bucket : buckets) {
    const exchange::Result& result = bucket->result;
    const auto hash = [](const auto& values) {
      return wire::xxh64(std::as_bytes(std::span(values)), 0);
    };
    sums += hash(result.sum.indices) ^ hash(result.sum.values) ^ hash(result.dense_sum);
  }
  return static_cast<std::uint32_t>(sums >> 32 ^ sums) | 1;
}

void Reducer::Impl::hold_vote() {
  StepVote::Ballot ballot{
      .run = run, .step = step, .finite = sound, .loss_scale = knows_scale ? loss_scale : 0};
  for (const auto& bucket : buckets) {
    if (bucket->segments.empty()) continue;
    ballot.finite = ballot.finite && bucket->channel.finite();
    // Ranks that decide on what is handed out must multiply by the same.
    ballot.one_scale = ballot.one_scale || bucket->narrow();
  }
  if (pipeline.compare) ballot.sums = fingerprint_of_sums();
  Stopwatch watch(running[Stage::network]);
  running.rounds += vote.hold(ballot, *comm);
  if (!knows_scale && vote.loss_scale() > 0) loss_scale = vote.loss_scale();
}

// Whether callers can use what they would be handed: sums, divisor and loss scale are the same on
// all ranks, so their answers are. If there is a loss scale, it must be lowered. Without one, a
// debt that grew too large for a caller would be in the way for ever: what is too much stays owed.
bool Reducer::Impl::fits_callers() {
  for (const auto& owner : buckets) {
    Bucket& bucket = *owner;
    const feedback::Feedback& feedback = memory(bucket);
    for (const Segment& segment : bucket.segments) {
      if (!segment.narrow() || !vote.used(segment.number)) continue;
      const float largest = feedback.largest_mean(compensated(bucket), segment, bucket.result,
                                              divisor_of(feedback), unit_of(feedback));
      if (largest <= segment.most) continue;
      if (loss_scale != 1 || !feedback.takes_back() || !std::isfinite(largest)) return false;
      take_back(bucket, segment);
    }
  }
  return true;
}

// Cuts the sums of a segment to what its caller can use; each rank owes an even part of the rest.
void Reducer::Impl::take_back(Bucket& bucket, const Segment& segment) {
  const feedback::Feedback& feedback = memory(bucket);
  exchange::Result& result = bucket.result;
  const auto divisor = static_cast<float>(divisor_of(feedback)), unit = unit_of(feedback);
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
  if (result.extent == exchange::Result::Extent::whole) {
    if (result.dense_settled.empty()) {
      result.dense_settled.resize(result.dense_sum.size());
      compensated(bucket).evaluate(result.dense_settled);
    }
    for (std::size_t i = begin; i < end; ++i) {
      result.dense_settled[i] -= cut(result.dense_sum[i]);
    }
    return;
  }
  std::array<SparseVector, 2> settled;
  for (std::size_t i = 0; i < result.sum.size(); ++i) {
    const Index place = result.sum.indices[i];
    if (place < begin || place >= end) continue;
    const float back = cut(result.sum.values[i]);
    if (back != 0) settled[1].push_back(place, -back);
  }
  settled[0].assign(result.settled);
  workspace.adder.add(settled, compensated(bucket).size(), result.settled);
}

// An estimate stays a mean over all ranks; only what is handed out is divided otherwise.
int Reducer::Impl::divisor_of(const feedback::Feedback& feedback) const {
  return feedback.is_estimate() ? comm->size() : vote.divisor();
}

float Reducer::Impl::unit_of(const feedback::Feedback& feedback) const {
  const float present = static_cast<float>(comm->size()) / static_cast<float>(vote.divisor());
  return feedback.is_estimate() ? loss_scale * present : loss_scale;
}

// What nobody used is not delivered: whatever was exchanged of it stays owed.
void Reducer::Impl::leave_out_unused(Bucket& bucket) {
  const bool whole = bucket.result.extent == exchange::Result::Extent::whole;
  std::erase_if(bucket.segments, [&](const Segment& segment) {
    if (vote.used(segment.number)) return false;
    const auto& places = bucket.result.sum.indices;
    const auto first = std::ranges::lower_bound(places, segment.start);
    const auto last =
        std::ranges::lower_bound(places, static_cast<Index>(segment.start + segment.size()));
    running.delivered -= whole ? segment.size() : static_cast<std::size_t>(last - first);
    return true;
  });
}

void Reducer::Impl::commit() {
  in_parts = true;
  double energy = 0, gone = 0;
  for (const auto& owner : buckets) {
    Bucket& bucket = *owner;
    if (bucket.segments.empty()) continue;
    const bool whole = bucket.result.extent == exchange::Result::Extent::whole;
    running.selected +=
        whole || !pipeline.selector ? bucket.result.delivered() : bucket.selected.size();
    running.delivered += bucket.result.delivered();
    energy += bucket.summary.energy;
    if (!vote.all_used()) leave_out_unused(bucket);
    if (bucket.segments.empty()) continue;
    feedback::Feedback& feedback = memory(bucket);
    gone += feedback.commit(compensated(bucket), bucket.result, divisor_of(feedback), unit_of(feedback));
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
void Reducer::Impl::spoil() {
  for (const auto& owner : buckets) {
    Bucket& bucket = *owner;
    if (on_device) device->spoil(bucket.segments);
    for (const Segment& segment : bucket.segments) {
      std::ranges::fill(segment.gradient, std::numeric_limits<float>::quiet_NaN());
    }
  }
}

void Reducer::Impl::abandon() noexcept {
  under_way.clear();
  for (const auto& bucket : buckets) {
    if (bucket) bucket->task = {};
  }
  // Once an exchange has started, peers may have heard of it, even if not from this rank.
  const bool begun = std::ranges::find(started, char{1}) != started.end();
  if (comm != nullptr && !begun) comm->leave();
  comm = nullptr;
}

// ---- the face ----------------------------------------------------------------------------------

Reducer::Reducer(Layout layout, const Spec& method)
    : impl_(std::make_unique<Impl>(std::move(layout), method)) {}
Reducer::Reducer(Layout layout, std::string_view method)
    : Reducer(std::move(layout), parse_spec(method)) {}
Reducer::~Reducer() = default;
Reducer::Reducer(Reducer&&) noexcept = default;
Reducer& Reducer::operator=(Reducer&&) noexcept = default;

void Reducer::agree(Communicator& comm) {
  impl_->expect_closed("agree");
  comm.enter({comm::Place::Kind::agree, impl_->step});
  expect_same_text(comm, "step " + std::to_string(impl_->step) + "\n" + impl_->description);
  impl_->agreed_ranks = comm.size();
  impl_->forget_order();
}

void Reducer::begin(Communicator& comm, float loss_scale) {
  const FloatMode mode;
  impl_->expect_closed("begin");
  if (impl_->agreed_ranks != comm.size()) agree(comm);
  impl_->agree_on_order(comm);
  impl_->begin(comm, loss_scale);
}

void Reducer::add(std::span<const std::size_t> parameters, std::span<float> gradient, float most) {
  const FloatMode mode;
  try {
    if (impl_->on_device) {
      throw std::invalid_argument("add: gradients must stay on the device, see on_device");
    }
    impl_->add(parameters, gradient, most);
  } catch (...) {
    abandon();
    throw;
  }
}

void Reducer::add_on_device(std::span<const std::size_t> parameters, float most) {
  const FloatMode mode;
  try {
    if (!impl_->on_device) {
      throw std::invalid_argument("add: gradients must come to main memory, see on_device");
    }
    impl_->add(parameters, {}, most);
  } catch (...) {
    abandon();
    throw;
  }
}

void Reducer::relocate(std::span<const std::size_t> parameters, std::span<float> gradient) {
  try {
    impl_->relocate(parameters, gradient);
  } catch (...) {
    abandon();
    throw;
  }
}

void Reducer::use(Device* device) {
  if (impl_->comm != nullptr) throw std::invalid_argument("use: a step is open");
  impl_->move_memory(*impl_->pipeline.feedback, impl_->pipeline, device);
}

bool Reducer::progress() {
  if (impl_->comm == nullptr) return false;
  const FloatMode mode;
  try {
    impl_->go_on();
    return !impl_->under_way.empty();
  } catch (...) {
    abandon();
    throw;
  }
}

bool Reducer::on_device() const {
  return impl_->on_device;
}

void Reducer::participate(const Participation& participation) {
  impl_->participate(participation);
}

const StepStats& Reducer::finish() {
  const FloatMode mode;
  try {
    impl_->finish();
  } catch (...) {
    abandon();
    throw;
  }
  return impl_->stats;
}

const StepStats& Reducer::average(Communicator& comm, std::span<float> gradient) {
  std::vector<std::size_t>& all = impl_->everything;
  if (all.empty()) {
    all.resize(impl_->layout.count());
    std::iota(all.begin(), all.end(), std::size_t{0});
  }
  begin(comm);
  add(all, gradient);
  return finish();
}

void Reducer::abandon() noexcept {
  impl_->abandon();
}

void Reducer::skip_to(std::uint64_t step) {
  if (impl_->comm != nullptr) throw std::invalid_argument("skip_to: a step is open");
  impl_->step = step;
}

void Reducer::configure(const Spec& changes) {
  Impl& now = *impl_;
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
  now.move_memory(keeps_memory ? *now.pipeline.feedback : *next.feedback, next, now.device);
  if (keeps_memory) next.feedback = std::move(now.pipeline.feedback);
  if (same("threads")) next.threads = std::move(now.pipeline.threads);
  if (same("select")) next.selector = std::move(now.pipeline.selector);
  if (same("exchange")) next.exchange = std::move(now.pipeline.exchange);
  now.pipeline = std::move(next);
  now.plan_buckets();
  now.given = std::move(wanted);
  const bool own_affair =
      changes.name.empty() && changes.settings.size() == 1 && changes.settings.contains("threads");
  if (!own_affair) now.describe_run();
}

void Reducer::set_mode(Mode mode) {
  if (impl_->comm != nullptr) throw std::invalid_argument("set_mode: a step is open");
  impl_->mode = mode;
  impl_->describe_run();
}

Reducer::Mode Reducer::mode() const {
  return impl_->mode;
}
std::vector<std::vector<std::size_t>> Reducer::buckets() const {
  std::vector<std::vector<std::size_t>> all;
  for (std::size_t b = 0; b < impl_->plan.count(); ++b) {
    all.emplace_back(impl_->plan[b].begin(), impl_->plan[b].end());
  }
  return all;
}
const Layout& Reducer::layout() const {
  return impl_->layout;
}
const Layout& Reducer::remembered() const {
  return impl_->pipeline.compressed;
}
const Spec& Reducer::spec() const {
  return impl_->pipeline.spec;
}
const StepStats& Reducer::stats() const {
  return impl_->stats;
}
std::uint64_t Reducer::step() const {
  return impl_->step;
}

double Reducer::density() const {
  return impl_->mode == Mode::bypass ? 1 : impl_->pipeline.density_at(impl_->step);
}

std::span<const float> Reducer::owed() const {
  return impl_->pipeline.feedback->owed();
}

void Reducer::visit(StateVisitor& visitor) {
  Impl& now = *impl_;
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
