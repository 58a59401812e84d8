#include "topreduce/tuning/density_controller.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <limits>
#include <span>
#include <sstream>
#include <utility>

namespace topreduce::tuning {
namespace {

constexpr std::uint64_t kFirstSteps = 2;  // which also allocate, connect and learn the order
constexpr std::size_t kMostLooks = 9;
constexpr std::size_t kEnough = 4;  // looks, where the first two leave a doubt
constexpr double kDoubt = 0.25;     // of what may be waited
constexpr std::size_t kNear = 2;    // rungs between good and bad that are not worth another look
constexpr double kNearly = 0.9;     // of what it may cost: not worth one either

// In the ramp.
constexpr double kFarTooLong = 2;  // times what is allowed: fewer looks are enough ...
constexpr std::size_t kSure = 3;   // ... than usual, but one only while nothing else is known
constexpr double kMostUpInRamp = 2, kLeastDownInRamp = 0.5;

// Holding still.
constexpr std::size_t kMedian = 5;  // steps
constexpr double kChanged = 2;      // times what is allowed, in the median: search anew
constexpr double kTooLong = 1.2;    // the same over all looks: a little less will do ...
constexpr double kWorthIt = 0.5;    // of what may be waited: what its bytes take, to send fewer
constexpr double kApart = 1.5, kFarApart = 8;  // bytes of rungs that tell what bytes take
constexpr double kLeastLess = 0.7;             // ... no fewer bytes than this share
constexpr double kBesides = 0.005;             // of a step, for both
constexpr double kQuicker = 0.5;               // exchanges, times the usual
constexpr double kMatters = 0.25;              // of the room: what exchanges take, to be looked at
constexpr double kLonger = 1.25;               // computing, times the usual
constexpr std::uint64_t kFirstPatience = 100, kLongestPatience = 1024;  // steps until a probe ...
constexpr std::uint64_t kPatienceBelow = 32;      // ... where it was a little higher before
constexpr std::uint64_t kPatienceAfterFall = 12;  // ... or far: what fell may rise again
constexpr double kMostUpInProbe = 1.4;
constexpr double kClearRoom = 0.8;  // of what it may cost, in a probe: search upwards

// Going up and down: factors of bytes.
constexpr double kLeastUp = 1.1, kMostUp = 4, kLeastDown = 1.0 / 32, kMostDown = 0.9;
constexpr double kLeastByProcessor = 0.25, kLeastFromHold = 0.5, kMostFromHold = 2;
constexpr double kOfTheRoom = 0.95;

// All that it costs, by waiting and by work on cores that compute, times what may be waited; and
// what is left of that for the bytes, where other work takes most of it. Work does not count with
// densities up to `kFew`: with less than half a percent models need clearly more steps, and less
// than that saves little.
constexpr double kInAll = 1.3, kForBytes = 0.5, kFew = 0.0056;
constexpr double kAboutAsMany = 1.1;  // bytes, which scatter
constexpr double kNearFew = 0.7;      // the logarithm of 2: rungs that tell of those bytes
// Seconds that one of work adds. Early steps are worth most: while little is known, it counts less.
constexpr double kGuess = 1.75, kGuessInRamp = 1, kGuessWithin = 0.4, kMostSlowdown = 6;
constexpr double kLeastScatter = 0.003;  // of the computing
constexpr double kDeviations = 1.5;      // a standard deviation, times the median deviation
constexpr std::size_t kMostVisits = 32;
constexpr double kAsPredicted = 0.9;   // bytes
constexpr double kStillRising = 1.08;  // bytes, from one look to the next

// Waiting that bytes are not to blame for.
constexpr double kAboveFloor = 1.1;

double median(std::span<double> values) {
  std::ranges::sort(values);
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace

DensityController::DensityController(std::vector<Rung> ladder, std::size_t start,
                                     const Options& options)
    : ladder_(std::move(ladder)),
      options_(options),
      overhead_(overhead_at(0)),
      rung_(start),
      patience_(kFirstPatience) {
  assert(rung_ < ladder_.size());
  for (const Rung& rung : ladder_) {
    if (rung.level.density <= kFew) few_ = rung.bytes;
  }
  looks_.reserve(kMostLooks);  // a step allocates nothing
  visits_.reserve(kMostVisits);
}

// Falls geometrically, as the density of methods that have a fixed one does.
double DensityController::overhead_at(std::uint64_t step) const {
  if (step < options_.warmup_steps) return std::max(options_.ramp_overhead, options_.overhead);
  const std::uint64_t into = step - options_.warmup_steps;
  if (into >= options_.ramp_steps || options_.ramp_overhead <= options_.overhead) {
    return options_.overhead;
  }
  const double done = static_cast<double>(into + 1) / static_cast<double>(options_.ramp_steps + 1);
  return options_.ramp_overhead * std::pow(options_.overhead / options_.ramp_overhead, done);
}

void DensityController::note(std::uint64_t step, const Level& used, const Measurement& taken) {
  overhead_ = overhead_at(step);
  const bool early = step < options_.warmup_steps + options_.ramp_steps;
  if (early) state_ = State::ramp;
  if (!early && state_ == State::ramp) {  // what was seen on the way still holds
    state_ = State::search;
    sort_out();
  }
  if (step < (early ? 1 : kFirstSteps) || used != level() || !taken.known()) return;
  if (to_skip_ > 0) {
    --to_skip_;
    return;
  }
  if (looks_.size() == kMostLooks) looks_.erase(looks_.begin());
  looks_.push_back(taken);
  if (state_ == State::ramp) return follow_ramp();
  if (state_ == State::probe) return probe();
  state_ == State::search ? search() : hold();
}

// Seconds of waiting that make the allowed part of a step with this computing, as it would be
// without our work beside it.
double DensityController::share_of(const Measurement& taken) const {
  return overhead_ / (1 - overhead_) * std::max(0.0, taken.computed - slowed(taken));
}

double DensityController::allowed(const Measurement& taken) const {
  return std::max(share_of(taken), floor_);
}

// What a step takes, as a part of what it may.
double DensityController::cost(const Measurement& taken) const {
  const double bytes = options_.most_bytes > 0 ? taken.bytes / options_.most_bytes : 0;
  const double in_all = taken.waited + slowed(taken);
  return std::max({taken.waited / allowed(taken), bytes,
                   taken.bytes <= few_bytes(taken) ? 0 : in_all / allowed_in_all(taken)});
}

// Seconds of computing that the work for the bytes adds.
double DensityController::slowed(const Measurement& taken) const {
  return slowdown_ * std::max(0.0, taken.busy - given_);
}

// For waiting and for the work that bytes take.
double DensityController::allowed_in_all(const Measurement& taken) const {
  const double share = share_of(taken);
  return floor_ + std::max(kInAll * share - slowdown_ * given_, kForBytes * share);
}

// Bytes of the highest density whose work does not count: as the rung sends that is nearest to it
// of those that were seen, or more if another near one does, as thresholds may still have followed.
// `taken`: at this rung, if there are none. Those of the ladder are of a smaller model.
double DensityController::few_bytes(const Measurement& taken) const {
  double nearest = std::numeric_limits<double>::max();
  double times = taken.bytes / ladder_[rung_].bytes;
  for (const Visit& visit : visits_) {
    if (ladder_[visit.rung].level.everything()) continue;
    const double bytes = ladder_[visit.rung].bytes, here = visit.taken.bytes / bytes;
    const double apart = std::max(kNearFew, std::abs(std::log(bytes / few_)));
    if (apart > nearest) continue;
    times = apart < nearest ? here : std::max(times, here);
    nearest = apart;
  }
  return kAboutAsMany * few_ * times;
}

// How many times as many bytes the processor allows. Of the waiting, what the exchange took beyond
// the computing shrinks with them.
double DensityController::by_processor(const Measurement& taken) const {
  const double slower = slowed(taken);
  if (slower <= 0) return kMostUp;
  const double beyond = std::max(taken.waited - allowed(taken), taken.exchanging - taken.overlap);
  const double exposed = std::clamp(beyond, 0.0, taken.waited);
  const double left = allowed_in_all(taken) - taken.waited;
  const double hidden = (left + exposed) / slower;
  const double shrinking = kOfTheRoom * (left + taken.exchanging) / (taken.exchanging + slower);
  const double few = std::min(kMostUp, few_bytes(taken) / taken.bytes);
  return std::clamp(std::min(hidden, shrinking), std::max(kLeastByProcessor, few), kMostUp);
}

// How much longer the computing takes with more work beside it: the slope of a line through all
// visits, held to a first guess as far as times scatter. And what of that work no lower rung would
// save, by a line through the lowest and the highest.
void DensityController::learn_processor() {
  const auto by_bytes = [](const Visit& visit) { return visit.taken.bytes; };
  const Measurement& low = std::ranges::min_element(visits_, {}, by_bytes)->taken;
  const Measurement& high = std::ranges::max_element(visits_, {}, by_bytes)->taken;
  given_ = low.busy;
  if (high.busy > low.busy && high.bytes > low.bytes) {
    const double of_bytes = (high.busy - low.busy) * low.bytes / (high.bytes - low.bytes);
    given_ = std::max(0.0, low.busy - of_bytes);
  }
  const auto count = static_cast<double>(visits_.size());
  double work = 0, computed = 0, scatter = 0;
  for (const Visit& visit : visits_) {
    work += visit.taken.busy / count;
    computed += visit.taken.computed / count;
    scatter += visit.scatter / count;
  }
  scatter = std::max(scatter, kLeastScatter * computed);
  double products = 0, squares = 0;
  for (const Visit& visit : visits_) {
    const double more = visit.taken.busy - work;
    products += more * (visit.taken.computed - computed);
    squares += more * more;
  }
  const double guess = state_ == State::ramp ? kGuessInRamp : kGuess;
  const double doubt = scatter * scatter / (kGuessWithin * kGuessWithin);
  const double slope = (products + doubt * guess) / (squares + doubt);
  slowdown_ = std::clamp(slope, 0.0, kMostSlowdown);
}

// What is known of the rungs, by what is known of the processor now.
void DensityController::sort_out() {
  good_.reset();
  bad_.reset();
  for (const Visit& visit : visits_) {
    if (fits(visit.taken) && visit.rung >= good_.value_or(0)) good_ = visit.rung;
  }
  for (const Visit& visit : visits_) {
    const bool above = !good_ || visit.rung > *good_;
    if (above && !fits(visit.taken) && visit.rung <= bad_.value_or(visit.rung)) bad_ = visit.rung;
  }
}

Measurement DensityController::median_of_last(std::size_t count) const {
  const auto last = std::span(looks_).last(std::min(count, looks_.size()));
  const auto of = [&](double Measurement::*member) {
    std::array<double, kMostLooks> values;
    std::ranges::transform(last, values.begin(),
                           [&](const Measurement& look) { return look.*member; });
    return median(std::span(values).first(last.size()));
  };
  return {of(&Measurement::computed), of(&Measurement::waited), of(&Measurement::exchanging),
          of(&Measurement::overlap),  of(&Measurement::bytes),  of(&Measurement::busy)};
}

// Of the computing, in the looks at this rung.
double DensityController::scatter() const {
  const double middle = median_of_last(kMostLooks).computed;
  std::array<double, kMostLooks> values;
  std::ranges::transform(looks_, values.begin(),
                         [&](const Measurement& look) { return std::abs(look.computed - middle); });
  return kDeviations * median(std::span(values).first(looks_.size()));
}

// The highest rung with at most so many bytes; the lowest if there is none.
std::size_t DensityController::rung_with(double bytes) const {
  const auto above = std::ranges::upper_bound(ladder_, bytes, {}, &Rung::bytes);
  return above == ladder_.begin() ? 0 : static_cast<std::size_t>(above - ladder_.begin()) - 1;
}

void DensityController::move_to(std::size_t rung) {
  rung_ = rung;
  looks_.clear();
  to_skip_ = 1;
}

// A search begins, from what is known of the rung that was held, if it is.
void DensityController::look_for(const Measurement* held) {
  state_ = State::search;
  good_.reset();
  bad_.reset();
  apart_.reset();
  visits_.clear();
  stride_ = 1;
  floor_ = 0;
  slower_.reset();
  if (held == nullptr) return;
  visits_.push_back({rung_, *held, scatter()});
  sort_out();
}

void DensityController::settle(std::size_t rung) {
  state_ = State::hold;
  usual_.reset();
  held_ = 0;
  if (rung != rung_) move_to(rung);
}

// By the processor too, and by what may be sent.
double DensityController::limited(double factor, const Measurement& taken) const {
  factor = std::min(factor, by_processor(taken));
  const bool budget = options_.most_bytes > 0 && taken.bytes > 0;
  return budget ? std::min(factor, options_.most_bytes / taken.bytes) : factor;
}

// How many times as many bytes there is time for. What exchanges can use before the last gradient
// comes, and what may be waited, is the room. Work grows no faster than the bytes.
double DensityController::factor_up(const Measurement& taken) const {
  const double room = taken.overlap + allowed(taken);
  double factor = kMostUp;
  if (taken.exchanging * kMostUp > room) factor = kOfTheRoom * room / taken.exchanging;
  return limited(factor, taken);
}

// What was too long would have taken so many bytes of the exchange.
double DensityController::factor_down(const Measurement& taken) const {
  double factor = 1;
  const double too_long = taken.waited - allowed(taken);
  if (too_long > 0) factor = taken.exchanging > 0 ? 1 - too_long / taken.exchanging : kLeastDown;
  return limited(factor, taken);
}

void DensityController::go_up(const Measurement& taken, double most) {
  const double bytes = ladder_[rung_].bytes * std::clamp(factor_up(taken), kLeastUp, most);
  move_to(std::min(std::max(rung_with(bytes), rung_ + stride_), ladder_.size() - 1));
  stride_ *= 2;
}

void DensityController::go_down(const Measurement& taken, double least) {
  const double factor = std::clamp(factor_down(taken), std::max(least, kLeastDown), kMostDown);
  stride_ = 1;
  move_to(std::min(rung_with(ladder_[rung_].bytes * factor), rung_ - 1));
}

// To what the last looks say would take as long as it may, up or down; not down where fewer bytes
// would hardly be quicker, and no further for a single slow step. What work costs is told by two
// rungs, so the second comes soon. Everything in finer formats only where that is free: early
// steps gain nothing by it.
void DensityController::follow_ramp() {
  const Measurement taken = median_of_last(kEnough);
  if (looks_.size() >= 2) {
    remember(rung_, taken);
    learn_processor();
  }
  const std::size_t sure = visits_.empty() ? 1 : kSure;
  const bool far = cost(taken) > kFarTooLong && looks_.size() >= sure;
  if (looks_.size() < kEnough && !far) return;
  const double least = far ? kLeastDown : kLeastDownInRamp;
  const auto next_rung = [&] {
    double factor = fits(taken)              ? std::min(factor_up(taken), kMostUpInRamp)
                    : !far && will_do(taken) ? 1.0
                                             : std::max(factor_down(taken), least);
    if (visits_.size() == 1 && rung_ > 0) factor = std::min(factor, kLeastDownInRamp);
    return rung_with(ladder_[rung_].bytes * factor);
  };
  std::size_t next = next_rung();
  const auto whole =
      std::ranges::find_if(ladder_, [](const Rung& rung) { return rung.level.everything(); });
  const auto coarsest = static_cast<std::size_t>(whole - ladder_.begin());
  if (next > coarsest) {
    const double now = std::exchange(overhead_, options_.overhead);
    next = std::max(coarsest, next_rung());
    overhead_ = now;
  }
  if (next != rung_) move_to(next);
}

void DensityController::remember(std::size_t rung, const Measurement& taken) {
  std::erase_if(visits_, [&](const Visit& visit) { return visit.rung == rung; });
  if (visits_.size() == kMostVisits) visits_.erase(visits_.begin());
  visits_.push_back({rung, taken, scatter()});
}

// A threshold may need some steps to follow the density. Fewer bytes than other rungs predict tell
// of a lower rung: this one. What sends everything needs no steps, and tells nothing of the others.
std::size_t DensityController::rung_sent(const Measurement& taken) const {
  if (level().everything()) return rung_;
  double usual = 0;
  for (const Visit& visit : visits_) {
    if (ladder_[visit.rung].level.everything()) continue;
    usual = std::max(usual, visit.taken.bytes / ladder_[visit.rung].bytes);
  }
  if (taken.bytes >= kAsPredicted * usual * ladder_[rung_].bytes) return rung_;
  return std::min(rung_with(taken.bytes / usual), rung_);
}

void DensityController::search() {
  if (looks_.size() < 2) return;
  if (looks_.size() == 2 && fits(looks_[0]) != fits(looks_[1])) return;
  const Measurement taken = median_of_last(kEnough);
  const auto doubtful = [](double seconds, double limit) {
    return std::abs(seconds - limit) < kDoubt * limit;
  };
  if (looks_.size() < kEnough && (doubtful(taken.waited, allowed(taken)) ||
                                  doubtful(taken.waited + slowed(taken), allowed_in_all(taken)))) {
    return;
  }
  const double last = looks_.back().bytes, before = looks_[looks_.size() - 2].bytes;
  if (last > kStillRising * before && looks_.size() < kMostLooks) return;
  std::size_t sent = rung_sent(taken);
  if (sent != rung_) {
    const bool news = (!good_ || sent > *good_) && (!bad_ || sent < *bad_);
    if (!news && looks_.size() < kMostLooks) return;
    if (!news) sent = rung_;
  }
  remember(sent, taken);
  learn_processor();
  sort_out();
  if (!good_ && slower_ && taken.waited > allowed(taken) &&
      taken.bytes < kClearlyFewer * slower_->bytes &&
      taken.waited > kHardlyShorter * slower_->waited) {
    // Fewer bytes are no remedy: what is left is the end of every step.
    floor_ = kAboveFloor * std::max(taken.waited, slower_->waited);
    sort_out();
    if (good_) return settle(*good_);
  }
  if (taken.waited > allowed(taken)) slower_ = taken;
  if (!good_ && bad_ == 0) {
    accept_the_end(taken);
    return settle(good_.value_or(0));
  }
  if (good_ == ladder_.size() - 1) return settle(*good_);
  if (good_ && bad_) {
    const std::size_t next = between();
    const bool nearly = cost(seen_at(*good_)) >= kNearly && next <= *good_ + kNear;
    return nearly || *bad_ - *good_ <= kNear ? settle(*good_) : move_to(next);
  }
  rung_ = good_ ? *good_ : *bad_;
  const Measurement known = seen_at(rung_);
  good_ ? go_up(known, kMostUp) : go_down(known);
}

// The lowest rung waits too long. If a higher one that was seen waits hardly longer, it is not for
// its bytes: what is left is the end of every step.
void DensityController::accept_the_end(const Measurement& lowest) {
  if (lowest.waited <= allowed(lowest)) return;  // work or a budget is what limits
  double longest = 0;
  for (const Visit& visit : visits_) {
    const bool more = lowest.bytes < kClearlyFewer * visit.taken.bytes;
    const bool longer = lowest.waited < kHardlyShorter * visit.taken.waited;
    if (more && !longer) longest = std::max(longest, visit.taken.waited);
  }
  if (longest == 0) return;
  floor_ = kAboveFloor * std::max(lowest.waited, longest);
  sort_out();
}

const Measurement& DensityController::seen_at(std::size_t rung) const {
  return std::ranges::find(visits_, rung, &Visit::rung)->taken;
}

// Where a line between good and bad costs as much as it may; or in the middle, if such a line has
// last brought them no nearer than that would have.
std::size_t DensityController::between() {
  const std::size_t apart = *bad_ - *good_;
  const bool by_line = !apart_ || 2 * apart <= *apart_;
  apart_ = by_line ? std::optional(apart) : std::nullopt;
  if (!by_line) return (*good_ + *bad_ + 1) / 2;
  const double low = cost(seen_at(*good_)), high = cost(seen_at(*bad_));
  const double from = ladder_[*good_].bytes, to = ladder_[*bad_].bytes;
  const std::size_t rung = rung_with(from + (to - from) * (1 - low) / (high - low));
  return std::clamp(rung, *good_ + 1, std::max(*good_ + 1, *bad_ - 1));
}

// Seconds that the bytes of a step take, by waiting and by work: what fewer of them could save. By
// lines from the lowest rung that was seen to others with clearly more bytes.
double DensityController::taken_by_bytes(const Measurement& taken) const {
  const double work = taken.bytes > few_bytes(taken) ? slowed(taken) : 0;
  const auto by_bytes = [](const Visit& visit) { return visit.taken.bytes; };
  const Measurement& low = std::ranges::min_element(visits_, {}, by_bytes)->taken;
  std::array<double, kMostVisits> slopes;
  std::size_t count = 0;
  for (const Visit& visit : visits_) {
    const double more = visit.taken.bytes / low.bytes;
    if (more < kApart || more > kFarApart) continue;
    slopes[count++] = (visit.taken.waited - low.waited) / (visit.taken.bytes - low.bytes);
  }
  if (count == 0) return taken.waited + work;
  const double slope = std::max(0.0, median(std::span(slopes).first(count)));
  return std::min(taken.waited, slope * taken.bytes) + work;
}

// Quick enough, or not to be made quicker by fewer bytes.
bool DensityController::will_do(const Measurement& taken) const {
  if (fits(taken)) return true;
  const bool too_many = options_.most_bytes > 0 && taken.bytes > options_.most_bytes;
  return !too_many && taken_by_bytes(taken) <= kWorthIt * share_of(taken);
}

// Whether a step takes longer than it may, by this factor, or sends more.
bool DensityController::exceeds(double factor, const Measurement& taken) const {
  const double beside = kBesides * (taken.computed + taken.waited);
  if (options_.most_bytes > 0 && taken.bytes > options_.most_bytes * (1 + overhead_)) return true;
  return taken.waited > factor * allowed(taken) + beside ||
         (taken.bytes > few_bytes(taken) &&
          taken.waited + slowed(taken) > factor * allowed_in_all(taken) + beside);
}

void DensityController::hold() {
  ++held_;
  if (looks_.size() < kMedian) return;
  const Measurement recent = median_of_last(kMedian);
  if (exceeds(kChanged, recent) && rung_ > 0) {
    patience_ = kPatienceAfterFall;
    fell_ = true;
    look_for(&recent);
    slower_ = recent;
    bad_ = rung_;
    return go_down(recent, kLeastFromHold);
  }
  if (looks_.size() < kMostLooks) return;
  const Measurement all = median_of_last(kMostLooks);
  remember(rung_, all);
  const bool enough = will_do(all);
  if (!enough && exceeds(kTooLong, all) && rung_ > 0) {
    patience_ = kPatienceBelow;
    const double less = std::clamp(factor_down(all), kLeastLess, kMostDown);
    return settle(std::min(rung_with(ladder_[rung_].bytes * less), rung_ - 1));
  }
  if (!usual_) usual_ = all;
  if (rung_ + 1 == ladder_.size()) return;
  const bool matters = usual_->exchanging > kMatters * (usual_->overlap + allowed(*usual_));
  const bool quicker = matters && all.exchanging < kQuicker * usual_->exchanging;
  const bool longer = all.computed > kLonger * usual_->computed;
  if ((quicker || longer) && enough) {
    patience_ = kFirstPatience;
    look_for(&all);
    return go_up(all, kMostFromHold);
  }
  if (all.exchanging * kQuicker > usual_->exchanging || all.computed * kLonger < usual_->computed) {
    usual_ = all;
  }
  if (held_ < patience_ || !enough) return;
  state_ = State::probe;
  held_rung_ = rung_;
  const double more = std::clamp(factor_up(all), 1.0, kMostUpInProbe);
  move_to(std::max(rung_with(ladder_[rung_].bytes * more), rung_ + 1));
}

// A look at a higher rung: it stays if that will do as well. After a fall it goes on if that is
// easy: what fell has risen again.
void DensityController::probe() {
  if (looks_.size() < kEnough) return;
  const Measurement taken = median_of_last(kEnough);
  remember(rung_, taken);
  if (fell_ && cost(taken) <= kClearRoom && rung_ + 1 < ladder_.size()) {
    patience_ = kFirstPatience;
    fell_ = false;
    look_for(&taken);
    return go_up(taken, kMostFromHold);
  }
  const bool better = will_do(taken);
  if (!better) patience_ = std::min(patience_ + patience_ / 2, kLongestPatience);
  settle(better ? rung_ : held_rung_);
}

void DensityController::resume(const Level& level, bool settled) {
  const auto distance = [&](const Rung& rung) {
    const double apart = std::abs(rung.level.density - level.density);
    return apart + (rung.level.everything() && rung.level.values != level.values ? 1 : 0);
  };
  const auto nearest = std::ranges::min_element(ladder_, {}, distance);
  look_for(nullptr);
  looks_.clear();
  rung_ = static_cast<std::size_t>(nearest - ladder_.begin());
  to_skip_ = 1;
  if (settled) settle(rung_);
}

std::string DensityController::reason() const {
  std::ostringstream text;
  text.precision(2);
  const auto percent = [](double share) { return 100 * share; };
  text << (settled() ? "settled" : state_ == State::ramp ? "first steps" : "searching");
  if (!looks_.empty()) {
    text << ": waits " << percent(median_of_last(kMedian).share()) << " % of a step";
  }
  text << ", " << percent(overhead_) << " % allowed";
  if (settled() && rung_ + 1 == ladder_.size()) text << "; there is no more to send";
  if (settled() && rung_ == 0 && ladder_.size() > 1) text << "; this is min_density already";
  if (!looks_.empty()) {
    const Measurement recent = median_of_last(kMedian);
    const double slower = slowed(recent) / (recent.computed + recent.waited);
    if (slower > 0.001) text << "; shares the processor for another " << percent(slower) << " %";
  }
  if (floor_ > 0) text << "; fewer bytes would save no time";
  return text.str();
}

}  // namespace topreduce::tuning
