#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <vector>

#include "tests/cluster.h"
#include "tests/faults.h"

// Training that goes on and on: random methods and numbers of ranks, faults, ranks that die, miss a
// commit or join (Reducer::rebuild), checkpoints that are loaded. After every step the laws are
// looked at.

namespace topreduce::laws {

struct SoakReport {
  std::uint64_t steps = 0;      // tried
  std::uint64_t committed = 0;  // by all ranks
  std::map<std::string, std::uint64_t> faults;
  std::uint64_t errors = 0;    // of survivors
  std::uint64_t behind = 0;    // steps that only some ranks committed: the last message was hit
  std::uint64_t rebuilds = 0;  // after a fault, or with one rank more
  std::uint64_t late = 0;      // ranks that had missed the last commit, and made it then
  std::uint64_t resumes = 0;   // from a checkpoint, in new reducers
  std::uint64_t runs = 0;      // with another method
  std::uint64_t entries = 0;   // whose conservation was looked at
  double slowest = 0;          // seconds from a fault until the last survivor knew
  double early_mb = 0, late_mb = 0;  // the most memory in the second and the last quarter
};

/// Throws std::runtime_error with what does not hold, the seed and the step.
class Soak {
 public:
  Soak(std::uint32_t seed, std::chrono::milliseconds timeout)
      : seed_(seed), random_(seed), timeout_(timeout) {
    start_run();
  }

  const SoakReport& run(std::uint64_t steps, const std::function<void(const SoakReport&)>& show) {
    while (report_.steps < steps) {
      take_step();
      const double memory = resident_mb();
      const std::uint64_t quarter = 4 * report_.steps / (steps + 1);
      if (quarter == 1) report_.early_mb = std::max(report_.early_mb, memory);
      if (quarter == 3) report_.late_mb = std::max(report_.late_mb, memory);
      if (show) show(report_);
    }
    return report_;
  }

 private:
  std::size_t draw(std::size_t below) { return random_() % below; }
  bool one_in(std::size_t count) { return draw(count) == 0; }

  void require(bool holds, const std::string& what) const {
    if (holds) return;
    throw std::runtime_error("soak: " + what + "; seed " + std::to_string(seed_) + ", try " +
                             std::to_string(report_.steps) + ", " + std::to_string(ranks_) +
                             " ranks, " + row_);
  }

  // ---- runs ----

  void start_run() {
    ++report_.runs;
    row_ = kRows[draw(std::size(kRows))];
    cut_ = all_cuts(layout_)[draw(4)];
    set_ranks(2 + static_cast<int>(draw(7)));
    reducers_ = make();
    residual_ = feedback_name((*reducers_)[0]) == "residual";
    places_ = places_in_memory((*reducers_)[0]);
    steps_left_ = 50 + draw(200);
    keep_checkpoint();
  }
  void set_ranks(int ranks) { ranks_ = ranks; }
  std::unique_ptr<Cluster> make() const {
    auto cluster = std::make_unique<Cluster>(ranks_, layout_, row_);
    constexpr Handing kHandings[] = {Handing::add, Handing::lend, Handing::lend_and_deliver};
    cluster->hand_over_by(kHandings[report_.runs % 3]);
    return cluster;
  }
  std::vector<State> states() {
    std::vector<State> all;
    for (Reducer& reducer : reducers_->reducers()) all.push_back(state_of(reducer));
    return all;
  }
  void load(Cluster& cluster, const std::vector<State>& states) const {
    for (int r = 0; r < ranks_; ++r) {
      Loader check(states[comm::at(r)], StateVisitor::Purpose::check), loader(states[comm::at(r)]);
      cluster[r].visit(check);
      cluster[r].visit(loader);
    }
  }
  void keep_checkpoint() { checkpoint_ = states(); }

  // New processes that load what the last ones saved, all of them.
  void resume(const std::vector<State>& from) {
    ++report_.resumes;
    reducers_ = make();
    load(*reducers_, from);
  }

  // All that are there go on together. Returns, by rank, the mean of the last step on those who had
  // missed its commit, and have made it now.
  std::vector<Floats> rebuild() {
    ++report_.rebuilds;
    set_ranks(reducers_->ranks());
    std::vector<Floats> late(comm::at(ranks_));
    run_ranks(ranks_, [&](Communicator& comm) {
      Reducer& reducer = (*reducers_)[comm.rank()];
      const auto mean = reducer.rebuild(comm, reducer.plan_rebuild(comm));
      late[comm::at(comm.rank())].assign(mean.begin(), mean.end());
    });
    for (const Floats& mean : late) report_.late += !mean.empty();
    keep_checkpoint();
    return late;
  }

  // One more, whose first debt is none. What everyone applies is a mean over the ranks, so it is
  // the mean of what is owed that stays.
  void join() {
    const std::vector<double> before = mean_owed();
    reducers_->join();
    rebuild();
    const std::vector<double> after = mean_owed();
    require(energy_of((*reducers_)[ranks_ - 1].owed()) == 0, "who joins owes something");
    for (std::size_t i = 0; residual_ && i < before.size(); ++i) {
      double largest = 0;
      for (const Reducer& reducer : reducers_->reducers()) {
        largest = std::max(largest, std::abs(static_cast<double>(reducer.owed()[i])));
      }
      require(std::abs(after[i] - before[i]) <= 1e-5 * largest, "a mean debt changes as one joins");
    }
  }
  std::vector<double> mean_owed() {
    std::vector<double> mean;
    for (const Reducer& reducer : reducers_->reducers()) {
      mean.resize(reducer.owed().size());
      for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += reducer.owed()[i] / double(ranks_);
    }
    return mean;
  }

  // ---- steps ----

  void take_step() {
    ++report_.steps;
    const std::vector<State> before = states();
    const std::vector<Floats> gradients =
        gradients_of(ranks_, static_cast<int>(draw(1 << 20)),
                     [&](int r, int s) { return heavy_tailed(r, s, layout_); });
    if (one_in(8)) return take_faulty_step(before, gradients);

    const auto outcomes = reducers_->step(gradients, cut_);
    for (const Outcome& outcome : outcomes) require(!outcome.failed(), outcome.error);
    ++report_.committed;
    check_laws(before, gradients, outcomes);
    if (one_in(40)) keep_checkpoint();
    if (one_in(100)) expect_same_after_resume();
    if (one_in(100) && ranks_ < 8) join();
    if (one_in(200)) resume(checkpoint_);
    if (--steps_left_ == 0) start_run();
  }

  void take_faulty_step(const std::vector<State>& before, const std::vector<Floats>& gradients) {
    const auto fault = static_cast<faults::Fault>(draw(faults::kFaultNames.size()));
    constexpr comm::Phase kPhases[] = {comm::Phase::agreement, comm::Phase::exchange,
                                       comm::Phase::vote};
    const comm::Phase phase = kPhases[draw(3)];
    const std::size_t peers = comm::at(ranks_ - 1);
    const faults::Target target{.rank = static_cast<int>(draw(comm::at(ranks_))),
                                .step = (*reducers_)[0].step(),
                                .phase = phase,
                                .skip = draw(phase == comm::Phase::exchange ? 2 * peers : peers)};
    if (phase == comm::Phase::agreement) {  // they compare settings anew
      for (Reducer& reducer : reducers_->reducers()) reducer.set_mode(Reducer::Mode::compress);
    }
    faults::Incident incident(ranks_, fault, target, static_cast<std::uint32_t>(random_()),
                              std::chrono::milliseconds(1));
    auto outcomes = reducers_->step(gradients, cut_, 1, [&](Communicator& comm) {
      comm.set_timeout(timeout_);
      return std::make_unique<faults::Faulty>(comm, incident);
    });
    if (incident.struck()) ++report_.faults[faults::kFaultNames[static_cast<std::size_t>(fault)]];
    report_.slowest = std::max(report_.slowest, incident.seconds());

    const Outcome* committed = nullptr;
    std::size_t failed = 0;
    bool dead = false;
    for (std::size_t r = 0; r < outcomes.size(); ++r) {
      const Outcome& outcome = outcomes[r];
      if (!outcome.failed()) {
        if (committed != nullptr) {
          require(same_bits(outcome.gradient, committed->gradient), "ranks have different means");
        }
        committed = &outcome;
        continue;
      }
      ++failed;
      require(outcome.state == before[r], "a step that failed changed rank " + std::to_string(r));
      dead = dead || outcome.error == faults::Killed::kText;
      if (outcome.error != faults::Killed::kText) {
        ++report_.errors;
        check_error(outcome.error, static_cast<int>(r), target.step, committed != nullptr);
      }
    }
    if (failed == 0) {
      ++report_.committed;
      return check_laws(before, gradients, outcomes);
    }
    if (dead && ranks_ == 2) return start_run();
    if (committed != nullptr || dead) {
      report_.behind += committed != nullptr;
      if (dead) reducers_->leave(target.rank);
      const Floats mean = committed == nullptr ? Floats() : committed->gradient;
      const std::vector<Floats> late = rebuild();
      for (std::size_t r = 0; r < late.size(); ++r) {
        require(late[r].empty() || same_bits(late[r], mean), "a late commit is another one");
        if (dead || late[r].empty()) continue;
        outcomes[r].gradient = late[r];
        outcomes[r].owed.assign((*reducers_)[static_cast<int>(r)].owed().begin(),
                                (*reducers_)[static_cast<int>(r)].owed().end());
      }
      if (!dead) check_laws(before, gradients, outcomes);
      return;
    }
    // The same ranks try again, as if nothing had happened.
    const auto again = reducers_->step(gradients, cut_);
    for (const Outcome& outcome : again) require(!outcome.failed(), outcome.error);
    ++report_.committed;
    check_laws(before, gradients, again);
  }

  void check_error(const std::string& error, int rank, std::uint64_t step, bool others_committed) {
    const auto has = [&](const std::string& words) {
      return error.find(words) != std::string::npos;
    };
    const bool vote = has("the vote");
    require(vote || has("bucket of parameter ") || has("the agreement") || has("the order of"),
            "an error without its phase: " + error);
    require(has("rank " + std::to_string(rank)) && has("step " + std::to_string(step)),
            "an error without its place: " + error);
    require(vote || !others_committed, "a rank committed what others never had: " + error);
  }

  // A checkpoint of now, loaded into new reducers, goes on with the same bits.
  void expect_same_after_resume() {
    const auto gradients = gradients_of(ranks_, static_cast<int>(report_.steps),
                                        [&](int r, int s) { return heavy_tailed(r, s, layout_); });
    const auto now = states();
    const auto here = reducers_->step(gradients, cut_);
    resume(now);
    const auto there = reducers_->step(gradients, cut_);
    for (std::size_t r = 0; r < here.size(); ++r) {
      require(same_bits(here[r].gradient, there[r].gradient) && here[r].state == there[r].state,
              "a resumed run is another one");
    }
  }

  void check_laws(const std::vector<State>& before, const std::vector<Floats>& gradients,
                  const std::vector<Outcome>& outcomes) {
    for (const Outcome& outcome : outcomes) {
      require(same_bits(outcome.gradient, outcomes[0].gradient), "ranks have different means");
    }
    if (!residual_) return;
    // What was owed and what came is applied, or owed.
    std::vector<Floats> owed;
    for (const State& state : before) owed.push_back(floats_of(state, "owed"));
    for (std::size_t i = 0; i < places_.size(); ++i) {
      const std::size_t at = places_[i];
      if (at == kNotRemembered) continue;
      double had = 0, left = 0, size = 0;
      for (std::size_t r = 0; r < outcomes.size(); ++r) {
        had += static_cast<double>(owed[r][at]) + gradients[r][i];
        left += outcomes[r].owed[at];
        size += std::abs(owed[r][at]) + std::abs(gradients[r][i]) + std::abs(outcomes[r].owed[at]);
      }
      const double applied = static_cast<double>(outcomes[0].gradient[i]) * ranks_;
      require(std::abs(had - left - applied) <= 1e-5 * size,
              "entry " + std::to_string(i) + " is lost: " + std::to_string(had - left) + " gone, " +
                  std::to_string(applied) + " applied");
      ++report_.entries;
    }
  }

  static double resident_mb() {
    std::ifstream file("/proc/self/statm");
    double all = 0, resident = 0;
    file >> all >> resident;
    return resident * static_cast<double>(sysconf(_SC_PAGESIZE)) / (1 << 20);
  }

  const std::uint32_t seed_;
  std::mt19937 random_;
  const std::chrono::milliseconds timeout_;
  const Layout layout_ = small_model();
  SoakReport report_;

  std::string row_;
  Cut cut_;
  int ranks_ = 0;
  std::unique_ptr<Cluster> reducers_;
  bool residual_ = false;
  std::vector<std::size_t> places_;
  std::uint64_t steps_left_ = 0;
  std::vector<State> checkpoint_;
};

inline std::string to_string(const SoakReport& report) {
  std::string faults;
  std::uint64_t all = 0;
  for (const auto& [name, count] : report.faults) {
    faults += (faults.empty() ? "" : ", ") + name + " " + std::to_string(count);
    all += count;
  }
  char text[1000];
  std::snprintf(
      text, sizeof text,
      "steps tried          %llu, committed by all ranks %llu, by some %llu\n"
      "faults               %llu (%s)\n"
      "errors of survivors  %llu, the last one knew after %.3f s at most\n"
      "runs                 %llu, rebuilds %llu (late commits %llu), resumes %llu\n"
      "conservation         looked at for %llu entries; the first that is lost ends the soak\n"
      "memory               %.1f MB at most in the second quarter, %.1f in the last\n",
      static_cast<unsigned long long>(report.steps),
      static_cast<unsigned long long>(report.committed),
      static_cast<unsigned long long>(report.behind), static_cast<unsigned long long>(all),
      faults.c_str(), static_cast<unsigned long long>(report.errors), report.slowest,
      static_cast<unsigned long long>(report.runs),
      static_cast<unsigned long long>(report.rebuilds),
      static_cast<unsigned long long>(report.late), static_cast<unsigned long long>(report.resumes),
      static_cast<unsigned long long>(report.entries), report.early_mb, report.late_mb);
  return text;
}

/// Whether memory did not grow.
inline bool is_flat(const SoakReport& report) {
  return report.late_mb <= 1.1 * report.early_mb + 4;
}

}  // namespace topreduce::laws
