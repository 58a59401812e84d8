#pragma once

#include <algorithm>
#include <bit>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "laws.h"
#include "topreduce/comm/thread.h"
#include "topreduce/pipeline.h"
#include "topreduce/reducer.h"
#include "topreduce/wire/value_format.h"

// Reducers on several ranks, driven step by step from one place, so that a test can compare what
// all ranks hold before and after.

namespace topreduce::laws {

// ---- state -------------------------------------------------------------------------------------

/// All that a checkpoint holds, as bits.
using State = std::map<std::string, std::vector<std::uint64_t>, std::less<>>;

class Saver final : public StateVisitor {
 public:
  Purpose purpose() const override { return Purpose::save; }
  void entries(std::string_view name, std::span<float> values) override {
    auto& bits = state[std::string(name)];
    for (const float value : values) bits.push_back(std::bit_cast<std::uint32_t>(value));
  }
  void parameters(std::string_view name, std::span<double> values) override {
    auto& bits = state[std::string(name)];
    for (const double value : values) bits.push_back(std::bit_cast<std::uint64_t>(value));
  }
  void number(std::string_view name, double& value) override { parameters(name, {&value, 1}); }

  State state;
};

class Loader final : public StateVisitor {
 public:
  explicit Loader(const State& state, Purpose purpose = Purpose::load)
      : state_(state), purpose_(purpose) {}

  Purpose purpose() const override { return purpose_; }

  void entries(std::string_view name, std::span<float> values) override {
    if (purpose_ == Purpose::check) return;
    std::ranges::transform(state_.find(name)->second, values.begin(), [](std::uint64_t bits) {
      return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    });
  }
  void parameters(std::string_view name, std::span<double> values) override {
    std::ranges::transform(state_.find(name)->second, values.begin(),
                           [](std::uint64_t bits) { return std::bit_cast<double>(bits); });
  }
  void number(std::string_view name, double& value) override { parameters(name, {&value, 1}); }

 private:
  const State& state_;
  Purpose purpose_;
};

inline State state_of(Reducer& reducer) {
  Saver saver;
  reducer.visit(saver);
  return saver.state;
}

inline Floats floats_of(const State& state, std::string_view name) {
  Floats values;
  for (const std::uint64_t bits : state.find(name)->second) {
    values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  }
  return values;
}

/// The rank's estimate of its gradient (feedback ef21, ef21m), or the mean that stands for it;
/// empty for all other feedbacks.
inline Floats estimate_of(const State& state) {
  for (const char* name : {"ef21m.estimate", "ef21m.mean"}) {
    if (state.contains(name)) return floats_of(state, name);
  }
  if (!state.contains("ef21.base")) return {};
  Floats estimate = floats_of(state, "ef21.base");
  for (float& x : estimate) x = 0 - x;
  return estimate;
}

/// A setting of a run's feedback, `otherwise` if it has none of that name.
inline double feedback_number(const Reducer& reducer, const char* name, double otherwise) {
  const Spec feedback = parse_spec(reducer.spec().settings.at("feedback"));
  const auto found = feedback.settings.find(name);
  return found == feedback.settings.end() ? otherwise : std::stod(found->second);
}

inline std::string feedback_name(const Reducer& reducer) {
  return parse_spec(reducer.spec().settings.at("feedback")).name;
}

/// What a feedback multiplies the newest gradient with.
inline float newest_scale(const Reducer& reducer) {
  const Spec feedback = parse_spec(reducer.spec().settings.at("feedback"));
  const bool nesterov = to_string(feedback).find("form=nesterov") != std::string::npos;
  const double momentum = nesterov ? feedback_number(reducer, "momentum", 0) : 0;
  return static_cast<float>(feedback_number(reducer, "eta", 1 + momentum));
}

/// The sum of squares.
inline double energy_of(std::span<const float> values) {
  double energy = 0;
  for (const float x : values) energy += static_cast<double>(x) * x;
  return energy;
}

// ---- comparing ---------------------------------------------------------------------------------

inline testing::AssertionResult same_bits(std::span<const float> got, std::span<const float> want) {
  if (got.size() != want.size()) {
    return testing::AssertionFailure() << got.size() << " entries, not " << want.size();
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::bit_cast<std::uint32_t>(got[i]) == std::bit_cast<std::uint32_t>(want[i])) continue;
    return testing::AssertionFailure() << "entry " << i << " is " << got[i] << ", not " << want[i];
  }
  return testing::AssertionSuccess();
}

/// Which entry of Reducer::owed belongs to each entry of the whole model; kNotRemembered for those
/// of keep_dense.
inline constexpr std::size_t kNotRemembered = ~std::size_t{0};
inline std::vector<std::size_t> places_in_memory(const Reducer& reducer) {
  std::vector<std::size_t> places;
  for (const Parameter& parameter : reducer.layout().parameters()) {
    const auto id = reducer.remembered().find(parameter.name);
    for (std::size_t i = 0; i < parameter.size; ++i) {
      places.push_back(id ? reducer.remembered()[*id].offset + i : kNotRemembered);
    }
  }
  return places;
}

/// Multiples of a scale are no whole numbers: their sums round in the last bits of a float.
inline bool has_scales(const Reducer& reducer) {
  return wire::values_per_scale(Pipeline(reducer.layout(), reducer.spec()).values) > 1;
}

// ---- the cluster -------------------------------------------------------------------------------

/// What one rank has after a step.
struct Outcome {
  Floats gradient;  ///< in parameter order
  Floats owed;
  State state;
  StepStats stats;
  comm::Traffic traffic;  ///< as the communicator counts it, agreement included
  std::string error;      ///< of the network or the wire; empty if the step went through

  bool failed() const { return !error.empty(); }
};

/// Takes one rank through a step, on that rank.
using Turn = std::function<Outcome(Reducer&, Communicator&)>;

inline std::vector<Outcome> meet_as_threads(std::span<Reducer> reducers, const Turn& turn) {
  std::vector<Outcome> outcomes(reducers.size());
  run_ranks(static_cast<int>(reducers.size()), [&](Communicator& comm) {
    const auto r = static_cast<std::size_t>(comm.rank());
    outcomes[r] = turn(reducers[r], comm);
  });
  return outcomes;
}

/// Where ranks meet: threads of this process, or the processes of a job (mpi/). Afterwards every
/// reducer has taken its turn, and all outcomes are here.
inline std::vector<Outcome> (*meet)(std::span<Reducer>, const Turn&) = meet_as_threads;

/// Makes of a rank's communicator the one that its reducer is given.
using Wrap = std::function<std::unique_ptr<Communicator>(Communicator&)>;

/// How gradients are handed over: lent, or lent with the means going elsewhere in every second
/// bucket.
enum class Handing { add, lend, lend_and_deliver };

class Cluster {
 public:
  Cluster(int ranks, const Layout& layout, std::string_view spec)
      : Cluster(ranks, layout, parse_spec(spec)) {}
  /// Unless `spec` says otherwise, buckets are small, so that even a small model has several.
  Cluster(int ranks, const Layout& layout, Spec spec) {
    spec.settings.emplace("bucket_cap_mb", "0");
    for (int r = 0; r < ranks; ++r) reducers_.emplace_back(layout, spec);
  }

  int ranks() const { return static_cast<int>(reducers_.size()); }
  Reducer& operator[](int rank) { return reducers_[static_cast<std::size_t>(rank)]; }
  std::span<Reducer> reducers() { return reducers_; }
  void hand_over_by(Handing handing) { handing_ = handing; }
  /// A rank is lost, or one that has made no steps comes as the last.
  void leave(int rank) { reducers_.erase(reducers_.begin() + rank); }
  void join() { reducers_.emplace_back(reducers_[0].layout(), reducers_[0].spec()); }

  /// One step; gradients by rank, each in parameter order. `participation`, by rank: what they say.
  std::vector<Outcome> step(const std::vector<Floats>& gradients, const Cut& cut,
                            float loss_scale = 1, const Wrap& wrap = {},
                            std::span<const Participation> participation = {}) {
    return meet(reducers_, [&](Reducer& reducer, Communicator& comm) {
      const auto wrapped = wrap ? wrap(comm) : nullptr;
      const auto r = static_cast<std::size_t>(comm.rank());
      return run(reducer, wrapped ? *wrapped : comm, gradients[r], cut, loss_scale, handing_,
                 participation.empty() ? nullptr : &participation[r]);
    });
  }

 private:
  static Outcome run(Reducer& reducer, Communicator& comm, const Floats& gradient, const Cut& cut,
                     float loss_scale, Handing handing, const Participation* participation) {
    std::vector<Floats> buckets;
    visit(reducer.layout(), cut, [&](std::size_t bucket, const Parameter& parameter, std::size_t) {
      buckets.resize(bucket + 1);
      const auto first = gradient.begin() + static_cast<std::ptrdiff_t>(parameter.offset);
      buckets[bucket].insert(buckets[bucket].end(), first,
                             first + static_cast<std::ptrdiff_t>(parameter.size));
    });
    buckets.resize(cut.size());

    const bool lends = handing != Handing::add;
    const auto delivers = [&](std::size_t b) {
      return handing == Handing::lend_and_deliver && b % 2 == 0;
    };
    std::vector<Floats> means;
    for (const Floats& bucket : buckets) means.emplace_back(bucket.size());
    Outcome outcome;
    try {
      reducer.begin(comm, loss_scale);
      for (std::size_t b = 0; b < cut.size(); ++b) {
        if (participation != nullptr && b + 1 == cut.size()) reducer.participate(*participation);
        lends ? reducer.lend(cut[b], buckets[b]) : reducer.add(cut[b], buckets[b]);
        if (delivers(b)) reducer.deliver_to(cut[b], means[b]);
      }
      outcome.stats = reducer.finish();
    } catch (const CommError& error) {
      outcome.error = error.what();
    } catch (const WireError& error) {
      outcome.error = error.what();
    } catch (const DriftError& error) {
      outcome.error = error.what();
    }
    outcome.traffic = comm.traffic();

    outcome.gradient.resize(gradient.size());
    visit(reducer.layout(), cut,
          [&](std::size_t bucket, const Parameter& parameter, std::size_t start) {
            const Floats& from = delivers(bucket) ? means[bucket] : buckets[bucket];
            std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(start), parameter.size,
                        outcome.gradient.begin() + static_cast<std::ptrdiff_t>(parameter.offset));
          });
    outcome.owed.assign(reducer.owed().begin(), reducer.owed().end());
    outcome.state = state_of(reducer);
    return outcome;
  }

  // body(bucket, parameter, its first entry in the bucket)
  template <class Body>
  static void visit(const Layout& layout, const Cut& cut, Body&& body) {
    for (std::size_t bucket = 0; bucket < cut.size(); ++bucket) {
      std::size_t start = 0;
      for (const std::size_t id : cut[bucket]) {
        body(bucket, layout[id], start);
        start += layout[id].size;
      }
    }
  }

  std::vector<Reducer> reducers_;
  Handing handing_ = Handing::add;
};

/// The gradients of all ranks in one step: make(rank, step).
template <class Make>
std::vector<Floats> gradients_of(int ranks, int step, Make&& make) {
  std::vector<Floats> gradients;
  for (int r = 0; r < ranks; ++r) gradients.push_back(make(r, step));
  return gradients;
}

}  // namespace topreduce::laws
