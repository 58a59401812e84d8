// What a step reports of itself is what was measured beside it.

#include "topreduce/stats.h"

#include <chrono>
#include <cmath>
#include <functional>

#include "cluster.h"
#include "topreduce/catalog.h"
#include "topreduce/wire/payload.h"
#include "topreduce/wire/seal.h"
#include "topreduce/wire/value_format.h"

namespace topreduce::laws {
namespace {

// What stands around a payload: a seal and three short numbers, the last of them its length; and
// once a step and peer the head of a frame.
constexpr std::size_t kLeastHead = wire::kSealBytes + 3, kMostHead = wire::kSealBytes + 5;
constexpr std::size_t kFirstFrame = comm::Mailbox::kFrameHead;
// A vote: its payload, and a long number for the exchange.
constexpr std::size_t kVote = 20 + kLeastHead + 4;

/// What a collective sends to each peer for so many bytes: call and checksum are among them.
std::size_t collective(std::size_t bytes) {
  return kFirstFrame + 5 + 1 + 1 + 5 + bytes;
}

/// What a payload takes if there is nothing to say.
std::size_t empty_payload() {
  SparseVector none;
  Bytes entries, values;
  wire::encode_entries(wire::ValueFormat::fp32, {}, none, entries, none);
  wire::encode_values(wire::ValueFormat::fp32, {}, {}, values, {});
  return std::max(entries.size(), values.size());
}

std::string exchange_of(const Reducer& reducer) {
  return parse_spec(reducer.spec().settings.at("exchange")).name;
}

// Where each rank's entries lie decides what these send; sparse_allreduce_test.cpp counts it.
bool sends_by_place(const std::string& exchange) {
  return exchange == "topk_dsa" || exchange == "gtopk" || exchange == "ok_topk";
}

// These deliver fewer entries than all ranks chose.
bool cuts_sums(const std::string& exchange) {
  return exchange == "gtopk" || exchange == "ok_topk";
}

class Stats : public testing::TestWithParam<const char*> {
 protected:
  std::vector<Outcome> take_step(Cluster& cluster, int step, const Cut& cut) const {
    return cluster.step(gradients(cluster.ranks(), step), cut);
  }
  std::vector<Floats> gradients(int ranks, int step) const {
    return gradients_of(ranks, step, [&](int r, int s) { return heavy_tailed(r, s, layout_); });
  }

  /// What was kept and what is left make up the energy of base + scale * gradient.
  void expect_energy_adds_up() const {
    Cluster cluster(3, layout_, GetParam());
    const float scale = newest_scale(cluster[0]);
    const std::string feedback = feedback_name(cluster[0]);
    std::vector<State> states;
    for (Reducer& each : cluster.reducers()) states.push_back(state_of(each));
    for (int s = 0; s < 8; ++s) {
      const auto before = gradients(3, s);
      const auto outcomes = cluster.step(before, three_buckets(layout_));
      for (std::size_t r = 0; r < 3; ++r) {
        Floats had = floats_of(states[r], feedback + ".base");
        const bool plain = s == 0 && feedback != "momentum";  // estimates start with the gradient
        for (std::size_t i = 0; i < had.size(); ++i) {
          had[i] = plain ? before[r][i] : had[i] + scale * before[r][i];
        }
        const StepStats& stats = outcomes[r].stats;
        const double all = energy_of(had), left = stats.owed_norm * stats.owed_norm;
        // Who cuts a sum takes it on: that can be more than was settled.
        EXPECT_NEAR(stats.kept_energy, std::max(0.0, 1 - left / all), 1e-4) << "step " << s;
        states[r] = outcomes[r].state;
      }
    }
  }

  const Layout layout_ = small_model();
};

INSTANTIATE_TEST_SUITE_P(Rows, Stats, testing::ValuesIn(rows()),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(Stats, TrafficIsTheCommunicators) {
  for (const int ranks : {1, 2, 5}) {
    Cluster cluster(ranks, layout_, GetParam());
    // Here they also agree: on the method, and on the order of buckets.
    for (int s = 0; s < 2; ++s) take_step(cluster, s, three_buckets(layout_));
    for (int s = 2; s < 8; ++s) {
      std::uint64_t sent = 0, received = 0;
      for (const Outcome& outcome : take_step(cluster, s, three_buckets(layout_))) {
        EXPECT_EQ(outcome.stats.bytes_sent, outcome.traffic.bytes_sent);
        EXPECT_EQ(outcome.stats.bytes_received, outcome.traffic.bytes_received);
        EXPECT_EQ(outcome.stats.messages, outcome.traffic.messages);
        EXPECT_EQ(outcome.stats.rounds == 0, ranks == 1);
        EXPECT_EQ(outcome.stats.step, static_cast<std::uint64_t>(s));
        EXPECT_EQ(outcome.stats.entries, layout_.size());
        sent += outcome.stats.bytes_sent;
        received += outcome.stats.bytes_received;
      }
      EXPECT_EQ(sent, received);
    }
  }
}

// Every message is its head, its values, and the indices where any travel.
TEST_P(Stats, BytesFollowTheCostFormula) {
  if (sends_by_place(exchange_of(Reducer(layout_, GetParam())))) return;
  const Cut cut = one_bucket(layout_);
  for (const int ranks : {2, 3, 8}) {
    Spec one_exchange = parse_spec(GetParam());
    one_exchange.settings["bucket_cap_mb"] = "1";
    Cluster cluster(ranks, layout_, one_exchange);
    const Spec& spec = cluster[0].spec();
    const Spec chosen = parse_spec(spec.settings.at("exchange"));
    const ExchangeEntry& entry = find_exchange(chosen.name);
    const auto exchange = entry.make({entry.name, entry.settings, chosen}, cluster[0].remembered());
    const auto dense = find_exchange("dense").make({"stats_test", {}, {}}, layout_);
    const Pipeline pipeline(layout_, spec);
    // Bytes of a value: what nobody remembers, and sketches, have 16 bits at least.
    const double least = wire::bits_per_value(pipeline.values) / 8;
    const double most = std::max(wire::bits_per_value(wire::without_scales(pipeline.values)),
                                 wire::bits_per_value(pipeline.unremembered)) /
                        8;
    const auto n = static_cast<double>(cluster[0].remembered().size());
    const auto kept = static_cast<double>(layout_.size()) - n;
    for (int s = 0; s < 8; ++s) {
      const auto outcomes = take_step(cluster, s, cut);
      std::uint64_t sent = 0;
      double selected = 0;
      for (std::size_t r = 0; r < outcomes.size(); ++r) {
        const Outcome& outcome = outcomes[r];
        sent += outcome.stats.bytes_sent;
        selected += static_cast<double>(outcome.stats.selected) - kept;
        // The first step without the fingerprint that they compared before it, the second without
        // the order of buckets, 4 bytes for each parameter, that rank 0 told the others.
        const bool told = s == 1 && pipeline.granularity == Granularity::bucket;
        const std::size_t extra = s == 0 ? collective(8)
                                  : told ? collective(r == 0 ? 4 * layout_.count() : 0)
                                         : 0;
        const std::uint64_t before = extra * static_cast<std::uint64_t>(ranks - 1);
        EXPECT_EQ(outcome.stats.bytes_sent + before, outcome.traffic.bytes_sent) << "step " << s;
      }
      const bool whole = outcomes[0].stats.budget == layout_.size();  // warm-up, early ramp
      const exchange::Cost cost = (whole ? *dense : *exchange).cost(selected / ranks, n, ranks);
      const exchange::Cost cost_kept = dense->cost(kept, kept, ranks);
      const std::uint64_t rounds = cost.rounds + (kept > 0 ? cost_kept.rounds : 0);
      const auto peers = static_cast<std::uint64_t>(ranks * (ranks - 1));
      const double values = ranks * (cost.values + cost_kept.values);
      const double indices = ranks * cost.indices;
      const auto heads = [&](std::size_t head) {
        return static_cast<double>(peers * (rounds * head + kFirstFrame + kVote));
      };
      EXPECT_EQ(outcomes[0].stats.rounds, rounds + 1);  // and the vote
      for (const Outcome& outcome : outcomes) {
        EXPECT_EQ(outcome.stats.messages, (rounds + 1) * static_cast<std::uint64_t>(ranks - 1));
      }
      EXPECT_GE(static_cast<double>(sent), heads(kLeastHead) + least * values) << "step " << s;
      // A scale, the end of a byte and two bits of extent for each parameter; a bit for each place.
      const auto parameters = static_cast<double>(rounds * peers * (3 * layout_.count() + 3));
      const double places = indices > 0 ? static_cast<double>(peers) * n / 8 : 0;
      EXPECT_LE(static_cast<double>(sent),
                heads(kMostHead + empty_payload()) + most * values + indices + parameters + places)
          << "step " << s;
    }
  }
}

// Known to the byte where the choice is known: one message to each peer.
TEST(Stats, TopkSendsItsMessageToEveryPeer) {
  const Layout layout = one_parameter(20000);
  Cluster cluster(3, layout, "topk:density=0.01,values=fp32,granularity=model");
  const auto gradients =
      gradients_of(3, 0, [&](int r, int step) { return heavy_tailed(r, step, layout); });
  const auto outcomes = cluster.step(gradients, one_bucket(layout));
  for (std::size_t r = 0; r < 3; ++r) {
    Floats magnitudes = gradients[r];
    for (float& x : magnitudes) x = std::abs(x);
    std::ranges::nth_element(magnitudes, magnitudes.begin() + 199, std::greater<>());
    SparseVector entries;
    for (std::size_t i = 0; i < gradients[r].size(); ++i) {
      if (std::abs(gradients[r][i]) < magnitudes[199]) continue;
      entries.push_back(static_cast<Index>(i), gradients[r][i]);
    }
    Bytes payload;
    const wire::Piece whole[] = {{0, 20000}};
    wire::encode_entries(wire::ValueFormat::fp32, whole, entries, payload, entries);
    const std::size_t message = kFirstFrame + kLeastHead + 1 + payload.size();  // a longer length
    EXPECT_EQ(outcomes[r].stats.selected, 200);
    EXPECT_EQ(outcomes[r].stats.messages, 4);
    EXPECT_EQ(outcomes[r].stats.bytes_sent, 2 * (message + kVote));
  }
}

// Where nothing is owed, one rank alone applies exactly what it settled. What is left is the
// difference of two sums, so next to nothing left it is known only to a part of the whole.
// (Estimates owe nothing; feedback_test.cpp has their distance.)
TEST_P(Stats, EnergyIsWhatWasSettled) {
  Reducer reducer(layout_, GetParam());
  const bool momentum = feedback_name(reducer) == "momentum";
  if (momentum || !estimate_of(state_of(reducer)).empty()) return expect_energy_adds_up();
  const bool owes = !reducer.owed().empty();
  Cluster cluster(owes ? 3 : 1, layout_, GetParam());
  const auto places = places_in_memory(cluster[0]);
  std::vector<Floats> owed(3, Floats(cluster[0].remembered().size()));
  for (int s = 0; s < 12; ++s) {
    const auto before = gradients(cluster.ranks(), s);
    const auto outcomes = cluster.step(before, three_buckets(layout_));
    for (std::size_t r = 0; r < outcomes.size(); ++r) {
      Floats had = before[r];
      for (std::size_t i = 0; i < had.size(); ++i) {
        if (places[i] != kNotRemembered) had[i] += owed[r][places[i]];
      }
      const double left =
          owes ? energy_of(outcomes[r].owed) : energy_of(had) - energy_of(outcomes[r].gradient);
      const StepStats& stats = outcomes[r].stats;
      // Who cuts a sum owes it: that can be more than was settled.
      EXPECT_NEAR(stats.kept_energy, std::max(0.0, 1 - left / energy_of(had)), 1e-4)
          << "step " << s;
      if (owes) {
        EXPECT_NEAR(stats.owed_norm * stats.owed_norm, left, 2e-4 * left + 1e-6 * energy_of(had))
            << "step " << s;
        owed[r] = outcomes[r].owed;
      } else {
        EXPECT_EQ(stats.owed_norm, 0);
      }
    }
  }
}

TEST_P(Stats, CountsAreWhatTravelled) {
  for (const int ranks : {1, 3}) {
    Cluster cluster(ranks, layout_, GetParam());
    const bool estimates = !estimate_of(state_of(cluster[0])).empty();
    Floats last(layout_.size());  // an estimate stays where nothing was delivered
    for (int s = 0; s < 8; ++s) {
      const double density = cluster[0].density();
      const auto outcomes = take_step(cluster, s, three_buckets(layout_));
      const StepStats& stats = outcomes[0].stats;
      std::uint64_t changed = 0;
      for (std::size_t i = 0; i < last.size(); ++i) {
        changed += outcomes[0].gradient[i] != last[i] ? 1 : 0;
      }
      if (estimates) last = outcomes[0].gradient;
      EXPECT_GE(stats.delivered, changed);
      if (cluster[0].spec().settings.at("values") == "fp32" && !estimates) {
        EXPECT_EQ(stats.delivered, changed);  // unrounded, these never cancel
      }
      std::uint64_t sum = 0;
      for (const Outcome& outcome : outcomes) {
        if (!cuts_sums(exchange_of(cluster[0]))) {
          EXPECT_LE(outcome.stats.selected, stats.delivered);
        }
        sum += outcome.stats.selected;
      }
      EXPECT_GE(sum, stats.delivered);
      const std::size_t n = cluster[0].remembered().size(), kept = layout_.size() - n;
      const std::string& select = cluster[0].spec().settings.at("select");
      if (density < 1 && stats.budget < layout_.size()) {
        EXPECT_EQ(stats.budget, kept + static_cast<std::uint64_t>(
                                           std::llround(density * static_cast<double>(n))));
      }
      if (cluster[0].spec().settings.at("exchange").starts_with("arc_topk")) {
        EXPECT_GE(stats.selected, stats.budget);  // whole rows, and small tensors whole
      } else if (select.empty() || select == "topk") {
        EXPECT_EQ(stats.selected, stats.budget);
      }
    }
  }
}

TEST_P(Stats, SecondsFitIntoTheStep) {
  Cluster cluster(1, layout_, GetParam());
  const auto start = std::chrono::steady_clock::now();
  const auto outcomes = take_step(cluster, 0, three_buckets(layout_));
  const std::chrono::duration<double> all = std::chrono::steady_clock::now() - start;
  double sum = 0;
  for (const double seconds : outcomes[0].stats.seconds) {
    EXPECT_GE(seconds, 0);
    sum += seconds;
  }
  EXPECT_GT(sum, 0);
  EXPECT_LE(sum, all.count());
}

}  // namespace
}  // namespace topreduce::laws
