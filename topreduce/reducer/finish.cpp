// The end of a step: the vote, then all of it is committed, or nothing.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "topreduce/drift.h"
#include "topreduce/reducer/impl.h"
#include "topreduce/wire/checksum.h"

namespace topreduce {
namespace {

// While gradients come: more would cost more processor time than the last of them gain.
constexpr int kLooks = 32;
constexpr std::chrono::milliseconds kLongestPace(20);

constexpr const char* kNativeAdvice =
    "; the transport's all-reduce does not give all of them the same bits: use reduce=ordered";

}  // namespace

void Reducer::Impl::finish() {
  expect_open("finish");
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
  const std::chrono::duration<double> exposed = last_ended - last_added;
  running.seconds_exposed = std::clamp(exposed.count(), 0.0, running.seconds_exchanging);
  voting = true;
  hold_vote();
  {
    Stopwatch watch(running[Stage::commit]);
    running.finite = vote.finite() && fits_callers();
  }
  vote_measured = vote.measured();
  running.finite = joint.hold(step, running.finite, vote_measured, running);
  if (running.finite && allows && !allows()) {
    throw CommError("step " + std::to_string(step) +
                    " was not committed on this rank, since commit_if said no; others may have");
  }
  voting = false;
  const std::uint64_t number = step;
  {
    Stopwatch watch(running[Stage::commit]);
    running.finite ? commit() : spoil();
  }
  const comm::Traffic traffic = comm->traffic();
  running.bytes_sent = traffic.bytes_sent - traffic_before.bytes_sent;
  running.bytes_received = comm->bytes_received_here();
  running.messages = traffic.messages - traffic_before.messages;
  try {
    comm->drain();
  } catch (const CommError&) {  // the step is committed; the next one will notice
  }
  stats = running;
  pace = std::min<Clock::duration>((last_added - opened_at) / kLooks, kLongestPace);
  comm = nullptr;
  time_step(number);
  if (order_is == Order::reversed) {
    order = arrivals;
    order_is = Order::observed;
  }
}

void Reducer::Impl::bring_sums(Bucket& bucket) {
  if (bucket.result.on_device == 0) return;
  compensated(bucket).open();
  exchange::bring(*device, bucket.result);
}

std::uint64_t Reducer::Impl::fingerprint_of_sums() {
  std::uint64_t sums = 0;  // buckets come in any order
  for (const auto& bucket : buckets) {
    bring_sums(*bucket);
    const exchange::Result& result = bucket->result;
    const auto hash = [](const auto& values) {
      return wire::xxh64(std::as_bytes(std::span(values)), 0);
    };
    sums += hash(result.sum.indices) ^ hash(result.sum.values) ^ hash(result.dense_sum);
  }
  return sums;
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
  Fingerprints mine{.parameters = parameters_seen.value_or(0)};
  if (pipeline.compare || parameters_seen) {
    mine.sums = fingerprint_of_sums();
    const std::uint64_t both = Fingerprint().add(mine.parameters).add(mine.sums).long_value();
    ballot.alike = static_cast<std::uint32_t>(both >> 32 ^ both) | 1;
  }
  if (controller) ballot.measured = measured.taken;
  Stopwatch watch(running[Stage::network]);
  running.rounds += vote.hold(ballot, *comm);
  if (!vote.alike()) report_drift(*comm, step, mine, pipeline.native ? kNativeAdvice : "");
  if (!knows_scale && vote.loss_scale() > 0) loss_scale = vote.loss_scale();
}

// Whether callers can use what they would be handed: sums, divisor and loss scale are the same on
// all ranks, so their answers are. If there is a loss scale, it must be lowered. Without one, a
// debt that grew too large for a caller would be in the way for ever: what is too much stays owed.
bool Reducer::Impl::fits_callers() {
  for (const auto& owner : buckets) {
    Bucket& bucket = *owner;
    const feedback::Feedback& feedback = memory(bucket);
    if (!fit_there(bucket)) bring_sums(bucket);
    if (bucket.result.on_device > 0) continue;
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

// Of sums that a device keeps: whether all of them fit, so that nobody need look at each.
bool Reducer::Impl::fit_there(Bucket& bucket) {
  if (bucket.result.on_device == 0 || !bucket.narrow()) return true;
  const feedback::Feedback& feedback = memory(bucket);
  float most = std::numeric_limits<float>::max();
  for (const Segment& segment : bucket.segments) most = std::min(most, segment.most);
  const float largest = device->largest_sum(bucket.result.key);
  return largest / static_cast<float>(divisor_of(feedback)) * unit_of(feedback) <= most;
}

// Cuts the sums of a segment to what its caller can use; each rank owes an even part of the rest.
void Reducer::Impl::take_back(Bucket& bucket, const Segment& segment) {
  const feedback::Feedback& feedback = memory(bucket);
  exchange::Result& result = bucket.result;
  const auto divisor = static_cast<float>(divisor_of(feedback)), unit = unit_of(feedback);
  // The largest sum that becomes no larger mean than `most`.
  float most = segment.most / unit * divisor;
  while (most / divisor * unit > segment.most) most = std::nextafter(most, 0.0f);
  const auto cut = [&](float& sum) {
    const float before = sum;
    sum = std::clamp(sum, -most, most);
    return (before - sum) / static_cast<float>(ranks);
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
  return feedback.is_estimate() ? ranks : vote.divisor();
}

float Reducer::Impl::unit_of(const feedback::Feedback& feedback) const {
  const float present = static_cast<float>(ranks) / static_cast<float>(vote.divisor());
  return feedback.is_estimate() ? loss_scale * present : loss_scale;
}

// Not where the sums may still be cut.
bool Reducer::Impl::may_settle_early(const Bucket& bucket) {
  return bucket.lent() && !bucket.narrow() && memory(bucket).settles_early();
}

void Reducer::Impl::settle(Bucket& bucket) {
  Stopwatch watch(running[Stage::commit]);
  bucket.settled = true;
  bucket.gone = memory(bucket).settle(compensated(bucket), bucket.result);
}

// As the vote will most likely have it: `commit` writes other means if not.
void Reducer::Impl::hand_out_early(Bucket& bucket) {
  if (!bucket.settled || bucket.handed_out || !bucket.delivers()) return;
  Stopwatch watch(running[Stage::commit]);
  bucket.handed_out = {ranks, loss_scale};
  feedback::Feedback::hand_out(compensated(bucket), bucket.result, ranks, loss_scale);
}

void Reducer::Impl::unsettle(Bucket& bucket) noexcept {
  if (bucket.settled) {
    for (const Segment& segment : bucket.segments) memory(bucket).unsettle(segment);
    bucket.keep();
  }
  bucket.lent_in.undo();
  bucket.taken_in = false;
}

// What nobody used is not delivered: whatever was exchanged of it stays owed.
void Reducer::Impl::leave_out_unused(Bucket& bucket) {
  const bool whole = bucket.result.extent == exchange::Result::Extent::whole;
  std::erase_if(bucket.segments, [&](const Segment& segment) {
    if (vote.used(segment.number)) return false;
    if (bucket.settled) memory(bucket).unsettle(segment);
    if (bucket.handed_out) std::ranges::fill(segment.mean, 0.0f);
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
    if (!vote.all_used()) {
      bring_sums(bucket);
      leave_out_unused(bucket);
    }
    if (bucket.segments.empty()) continue;
    feedback::Feedback& feedback = memory(bucket);
    if (bucket.lent() && feedback.settles_early()) {
      if (!bucket.settled) settle(bucket);
      gone += bucket.gone;
      const Bucket::Mean mean{divisor_of(feedback), unit_of(feedback)};
      if (bucket.handed_out == mean) continue;
      feedback.hand_out(compensated(bucket), bucket.result, mean.ranks, mean.unit);
      continue;
    }
    gone += feedback.commit(compensated(bucket), bucket.result, divisor_of(feedback),
                            unit_of(feedback));
    for (const Segment& segment : bucket.segments) {
      if (!segment.mean.empty()) std::ranges::copy(segment.gradient, segment.mean.begin());
    }
  }
  if (on_device) gone += device->settled_energy();
  if (regime == Regime::compress) {
    if (pipeline.selector) pipeline.selector->commit();
    pipeline.exchange->commit();
  }
  if (energy > 0) {
    running.kept_energy = std::clamp(gone / energy, 0.0, 1.0);
    const bool owes = regime != Regime::bypass && pipeline.feedback->has_base();
    running.owed_norm = owes ? std::sqrt(std::max(0.0, energy - gone)) : 0;
  }
  for (const auto& bucket : buckets) bucket->keep();
  vote.tell(last_vote, step, loss_scale);
  note_density();
  ++step;
  in_parts = false;
}

// As in plain DDP, everyone sees that the step is lost.
void Reducer::Impl::spoil() {
  for (const auto& owner : buckets) {
    Bucket& bucket = *owner;
    if (on_device) device->spoil(bucket.segments);
    unsettle(bucket);
    for (const Segment& segment : bucket.segments) {
      const std::span<float> mean = segment.mean.empty() ? segment.gradient : segment.mean;
      std::ranges::fill(mean, std::numeric_limits<float>::quiet_NaN());
    }
  }
}

void Reducer::Impl::abandon(std::string_view why) noexcept {
  if (comm != nullptr) {
    try {
      dropped = why;
    } catch (...) {  // no memory for the reason
      dropped.clear();
    }
  }
  in_flight.clear();
  if (std::exchange(voting, false)) keep_for_later();
  for (const auto& bucket : buckets) {
    if (!bucket) continue;
    bucket->task = {};
    unsettle(*bucket);
  }
  // Once an exchange has started, peers may have heard of it, even if not from this rank.
  const bool begun = std::ranges::find(started, char{1}) != started.end();
  if (comm != nullptr && !begun) comm->leave();
  if (comm != nullptr) joint.leave();  // nothing is said there before the vote
  comm = nullptr;
}

// In a handler: drops the step and throws on. What failed between the ranks, some may have heard
// and others not, settings and the order of buckets among it: they compare anew.
void Reducer::Impl::fail() {
  try {
    throw;
  } catch (const CommError& error) {
    abandon(error.what());
    agreed_ranks = 0;
    throw;
  } catch (const WireError& error) {
    abandon(error.what());
    agreed_ranks = 0;
    throw;
  } catch (const std::exception& error) {
    abandon(error.what());
    throw;
  } catch (...) {
    abandon();
    throw;
  }
}
}  // namespace topreduce
