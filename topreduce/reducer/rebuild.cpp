// Ranks that go on after others were lost, or with others: who has which step, the last commit of
// those who missed its vote, and what is owed among another number of ranks.
//
//   meet        all tell where they are; the last step that any of them has committed is the last
//   (caller)    parameters go from ranks that are on time to those that are not
//   outcome     of that step's vote, for those who are late: they have the sums
//   learnt      thresholds and such, for those who join
//   barrier     then every rank changes, and nothing of that can fail
//
// A rank that fails in the barrier keeps all it needs to change: if another has, it does so too
// when they meet next.

#include "topreduce/rebuild.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <stdexcept>

#include "topreduce/agreement.h"
#include "topreduce/reducer/impl.h"
#include "topreduce/wire/little_endian.h"

namespace topreduce {
namespace {

using Role = RebuildPlan::Role;

// What each rank tells when they meet.
struct Card {
  std::uint64_t step = 0;
  std::uint32_t ranks = 0;  // of its last step
  std::uint32_t in_doubt = 0;
  double energy = 0;           // of what it owes
  std::uint32_t rebuilds = 0;  // that it has been through
  std::uint32_t awaited = 0;   // their number once the one is through that failed here; 0: none
  std::uint64_t awaited_step = 0;

  static constexpr std::size_t kBytes = 40;
  std::array<std::byte, kBytes> pack() const {
    std::array<std::byte, kBytes> bytes;
    wire::store(bytes.data(), step);
    wire::store(bytes.data() + 8, ranks);
    wire::store(bytes.data() + 12, in_doubt);
    wire::store(bytes.data() + 16, std::bit_cast<std::uint64_t>(energy));
    wire::store(bytes.data() + 24, rebuilds);
    wire::store(bytes.data() + 28, awaited);
    wire::store(bytes.data() + 32, awaited_step);
    return bytes;
  }
  static Card unpack(std::span<const std::byte> bytes) {
    if (bytes.size() != kBytes) {
      throw WireError("rebuild: " + std::to_string(bytes.size()) + " bytes of a rank's step");
    }
    const Card card{wire::load<std::uint64_t>(bytes.data()),
                    wire::load<std::uint32_t>(bytes.data() + 8),
                    wire::load<std::uint32_t>(bytes.data() + 12),
                    std::bit_cast<double>(wire::load<std::uint64_t>(bytes.data() + 16)),
                    wire::load<std::uint32_t>(bytes.data() + 24),
                    wire::load<std::uint32_t>(bytes.data() + 28),
                    wire::load<std::uint64_t>(bytes.data() + 32)};
    if (!(card.energy >= 0) || !std::isfinite(card.energy) || card.ranks > 1u << 30) {
      throw WireError("rebuild: the step that a rank told is impossible");
    }
    return card;
  }
};

// Whether another has gone through with the rebuild that this one failed in.
bool was_carried_out(const Card& card, std::span<const Card> cards) {
  return card.awaited != 0 && std::ranges::any_of(cards, [&](const Card& other) {
           return other.rebuilds >= card.awaited && other.step == card.awaited_step;
         });
}

// Numbers that stages have learnt, without what is kept by entry.
class LearntSaver final : public StateVisitor {
 public:
  Purpose purpose() const override { return Purpose::save; }
  void entries(std::string_view, std::span<float>) override {}
  void parameters(std::string_view, std::span<double> values) override {
    for (double& value : values) number({}, value);
  }
  void number(std::string_view, double& value) override {
    const auto bits = std::bit_cast<std::uint64_t>(value);
    const std::size_t end = bytes.size();
    bytes.resize(end + sizeof(bits));
    wire::store(bytes.data() + end, bits);
  }

  Bytes bytes;
};

// Takes these over; what is kept by entry becomes zero.
class LearntLoader final : public StateVisitor {
 public:
  LearntLoader(std::span<const std::byte> bytes, Purpose purpose)
      : bytes_(bytes), purpose_(purpose) {}
  Purpose purpose() const override { return purpose_; }
  void entries(std::string_view, std::span<float> values) override {
    if (purpose_ == Purpose::load) std::ranges::fill(values, 0.0f);
  }
  void parameters(std::string_view name, std::span<double> values) override {
    for (double& value : values) number(name, value);
  }
  void number(std::string_view, double& value) override {
    value = std::bit_cast<double>(wire::load<std::uint64_t>(bytes_.data()));
    bytes_ = bytes_.subspan(sizeof(std::uint64_t));
  }

 private:
  std::span<const std::byte> bytes_;
  Purpose purpose_;
};

// Multiplies what is kept by entry.
class Scaler final : public StateVisitor {
 public:
  explicit Scaler(float scale) : scale_(scale) {}
  Purpose purpose() const override { return Purpose::load; }
  void entries(std::string_view, std::span<float> values) override {
    for (float& value : values) value *= scale_;
  }
  void parameters(std::string_view, std::span<double>) override {}
  void number(std::string_view, double&) override {}

 private:
  float scale_;
};

}  // namespace

int RebuildPlan::count(Role role) const {
  return static_cast<int>(std::ranges::count(roles, role));
}

bool RebuildPlan::same_ranks() const {
  return count(Role::joins) == 0 && static_cast<int>(roles.size()) == ranks_before;
}

float RebuildPlan::scale() const {
  const auto ranks = static_cast<int>(roles.size());
  return static_cast<float>(ranks) / static_cast<float>(ranks - count(Role::joins));
}

RebuildPlan Reducer::Impl::plan_rebuild(Communicator& communicator) {
  if (joint.any()) {
    throw std::invalid_argument(
        "rebuild: this is one part of a model in shards; start the run "
        "anew from a checkpoint");
  }
  communicator.enter({comm::Place::Kind::rebuild, 0});
  // With method=auto the exchange follows from the number of ranks, which differs for who joins.
  expect_same_text(communicator, given.name == "auto"
                                     ? describe(layout, Pipeline(layout, given).spec)
                                     : description);
  std::vector<Card> cards;
  const auto gather = [&] {
    Card mine{.step = step,
              .ranks = static_cast<std::uint32_t>(ranks),
              .in_doubt = doubt.has_value(),
              .rebuilds = rebuilds,
              .awaited = rebuilding ? rebuilding->roster.rebuilds + 1 : 0,
              .awaited_step = rebuilding ? rebuilding->roster.step : 0};
    for (const float owed : pipeline.feedback->owed()) {
      mine.energy += static_cast<double>(owed) * owed;
    }
    comm::Inbox inbox;
    communicator.all_gather(mine.pack(), inbox);
    cards.clear();
    for (int r = 0; r < communicator.size(); ++r) cards.push_back(Card::unpack(inbox.from(r)));
  };
  gather();
  const auto carried_out = [&](const Card& card) { return was_carried_out(card, cards); };
  if (std::ranges::any_of(cards, carried_out)) {
    if (carried_out(cards[comm::at(communicator.rank())])) carry_out_rebuild();
    gather();
  }

  RebuildPlan roster;
  const auto newest = std::ranges::max_element(cards, {}, &Card::step);  // the first of them
  roster.step = newest->step;
  roster.leader = static_cast<int>(newest - cards.begin());
  roster.ranks_before = static_cast<int>(newest->ranks);
  double energy = 0;
  for (const Card& card : cards) {
    const bool late = card.in_doubt != 0 && card.step + 1 == roster.step;
    roster.roles.push_back(card.step == roster.step ? Role::on_time
                           : late                   ? Role::late
                                                    : Role::joins);
    if (roster.roles.back() != Role::joins) energy += card.energy;
  }
  roster.rebuilds = std::ranges::max(cards, {}, &Card::rebuilds).rebuilds;
  const int survivors = communicator.size() - roster.count(Role::joins);
  roster.lost = std::max(0, roster.ranks_before - survivors);
  roster.lost_norm = std::sqrt(energy / survivors * roster.lost);
  return roster;
}

std::span<const float> Reducer::Impl::rebuild(Communicator& communicator,
                                              const RebuildPlan& roster) {
  if (static_cast<int>(roster.roles.size()) != communicator.size()) {
    throw std::invalid_argument("rebuild: the plan is for " + std::to_string(roster.roles.size()) +
                                " ranks, and these are " + std::to_string(communicator.size()));
  }
  communicator.enter({comm::Place::Kind::rebuild, roster.step});
  const Role role = roster.roles[comm::at(communicator.rank())];
  StepVote::Outcome outcome = last_vote;
  if (roster.count(Role::on_time) < communicator.size()) {
    Bytes bytes(StepVote::Outcome::bytes_for(layout.count()));
    if (communicator.rank() == roster.leader) last_vote.store(bytes);
    communicator.broadcast(bytes, roster.leader);
    outcome.load(bytes);
    if (roster.count(Role::late) > 0 && outcome.step + 1 != roster.step) {
      throw WireError("rebuild: rank " + std::to_string(roster.leader) +
                      " tells of the vote of step " + std::to_string(outcome.step) +
                      ", but the last one was " + std::to_string(roster.step - 1));
    }
  }
  if (role == Role::joins) prepare_for(roster.ranks_before);  // to learn the same
  LearntSaver learnt;
  if (roster.count(Role::joins) > 0) {
    visit(learnt);
    communicator.broadcast(learnt.bytes, roster.leader);
    if (role == Role::joins) {
      LearntLoader check(learnt.bytes, StateVisitor::Purpose::check);
      visit(check);
    }
  }
  // What needs memory comes before the point of no return.
  rebuilding.reset();
  rebuilding.emplace(Rebuilding{roster, role, std::move(outcome), std::move(learnt.bytes),
                                Pipeline(layout, with_exchange(given, roster.ranks_before)),
                                communicator.size()});
  communicator.barrier();
  if (!late_mean_is_new) late_mean.clear();
  carry_out_rebuild();
  late_mean_is_new = false;
  return late_mean;
}

// Nothing here can fail.
void Reducer::Impl::carry_out_rebuild() {
  Rebuilding now = std::move(*rebuilding);
  rebuilding.reset();
  auto& [roster, role, outcome, learnt, fresh, new_ranks] = now;
  if (role == Role::late) {
    commit_late(outcome);
    late_mean.swap(doubt->memory);
    late_mean_is_new = true;
  }
  doubt.reset();
  if (role == Role::joins) {
    LearntLoader load(learnt, StateVisitor::Purpose::load);
    visit(load);
    last_vote = outcome;  // it may be asked next
  }
  if (!roster.same_ranks()) {
    // Regions and thresholds are for so many ranks. An estimate is a mean over other ranks.
    pipeline.exchange = std::move(fresh.exchange);
    if (pipeline.feedback->is_estimate()) pipeline.feedback = std::move(fresh.feedback);
    if (role != Role::joins && roster.scale() != 1) {
      Scaler scaler(roster.scale());
      pipeline.feedback->visit(scaler);
    }
  }
  step = roster.step;
  in_parts = false;
  if (roster.count(Role::on_time) < new_ranks || !roster.same_ranks()) {
    prepared_ranks = 0;  // a density is found anew: not all know what was measured
    coming.reset();
  }
  ranks = agreed_ranks = new_ranks;
  rebuilds = roster.rebuilds + 1;
  forget_order();
}

// ---- a step whose vote failed here, and may have gone through elsewhere ------------------------

// Keeps what a commit needs: gradients where nothing was settled, else what is owed after it. The
// caller's memory may be gone by then.
bool Reducer::Impl::keep_for_later() noexcept {
  if (on_device) return false;
  try {
    doubt.emplace();
    doubt->memory.resize(layout.size());
    for (const auto& bucket : buckets) {
      doubt->settled.push_back(bucket->settled);
      for (const Segment& segment : bucket->segments) {
        const auto owed = bucket->settled
                              ? memory(*bucket).base().subspan(segment.offset, segment.size())
                              : std::span<const float>(segment.gradient);
        std::ranges::copy(owed, place_of(segment).begin());
      }
    }
    return true;
  } catch (...) {
    doubt.reset();
    return false;
  }
}

std::span<float> Reducer::Impl::place_of(const Segment& segment) {
  return std::span(doubt->memory).subspan(layout[segment.number].offset, segment.size());
}

void Reducer::Impl::commit_late(const StepVote::Outcome& outcome) {
  vote.adopt(outcome);
  if (!knows_scale && outcome.loss_scale > 0) loss_scale = outcome.loss_scale;
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    Bucket& bucket = *buckets[i];
    for (Segment& segment : bucket.segments) {
      segment.gradient = place_of(segment);
      segment.mean = {};
      if (doubt->settled[i] == 0) continue;
      if (vote.used(segment.number)) {
        memory(bucket).unsettle(segment);  // brings what is owed after the step
      } else {                             // for `commit` to take back
        const auto owed = memory(bucket).base().subspan(segment.offset, segment.size());
        std::ranges::copy(owed, segment.gradient.begin());
      }
    }
    bucket.settled = doubt->settled[i] != 0;
  }
  fits_callers();  // as on the other ranks: it may cut sums
  commit();
}

}  // namespace topreduce
