#pragma once

// The order of a step, and nothing else of it:
//
//   begin    open the transaction
//   add      look, choose, exchange            each bucket that is complete, while others still
//   finish   look, choose, exchange            compute; or once, for the whole model
//            vote, commit, decode              all of it, or nothing
//
// Until the vote only `buckets` are written, gradients that were lent, and places for their means;
// what is owed can be made what it was.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "topreduce/bucket.h"
#include "topreduce/bucket_plan.h"
#include "topreduce/joint_vote.h"
#include "topreduce/pipeline.h"
#include "topreduce/rebuild.h"
#include "topreduce/reducer.h"
#include "topreduce/tuning/processor_load.h"
#include "topreduce/vote.h"

namespace topreduce {

// How a step treats the compressed parameters.
enum class Regime { compress, dense, bypass };

struct TOPREDUCE_LOCAL Reducer::Impl {
  Impl(Layout whole, const Spec& method);

  // Between steps.
  void describe_run();
  void move_memory(feedback::Feedback& memory, const Pipeline& next, Device* wanted);
  void configure(const Spec& changes);
  void visit(StateVisitor& visitor);

  // How the model is cut into buckets.
  void forget_order();
  void agree_on_order(Communicator& communicator);
  void plan_buckets();

  // How much a step sends.
  void prepare_for(int size);
  void start_search();
  tuning::Level next_level() const;
  void note_density();
  void note_gradient();
  void time_step(std::uint64_t number);
  void timed(double computed, double waited);
  void timed_since(std::chrono::steady_clock::time_point last);
  void visit_density(StateVisitor& visitor);

  void begin(Communicator& communicator, float scale);
  void add(const char* caller, std::span<const std::size_t> parameters, std::span<float> gradient,
           float most, bool lent = false);
  void deliver_to(std::span<const std::size_t> parameters, std::span<float> means);
  void relocate(std::span<const std::size_t> parameters, std::span<float> gradient);
  void participate(const Participation& participation);
  void finish();
  void abandon(std::string_view why = {}) noexcept;
  [[noreturn]] void fail();

  void expect_open(const char* caller) const;
  void expect_closed(const char* caller) const;
  std::size_t mark_added(const char* caller, std::span<const std::size_t> parameters);
  Bucket& holder_of(std::size_t parameter);
  Segment* started_segment(std::size_t parameter);
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
  void bring_sums(Bucket& bucket);
  std::uint64_t fingerprint_of_sums();
  bool fits_callers();
  bool fit_there(Bucket& bucket);
  void take_back(Bucket& bucket, const Segment& segment);
  bool may_settle_early(const Bucket& bucket);
  void settle(Bucket& bucket);
  void hand_out_early(Bucket& bucket);
  void unsettle(Bucket& bucket) noexcept;
  int divisor_of(const feedback::Feedback& feedback) const;
  float unit_of(const feedback::Feedback& feedback) const;
  void leave_out_unused(Bucket& bucket);
  void commit();
  void spoil();

  // Ranks that were lost, and others that come.
  RebuildPlan plan_rebuild(Communicator& communicator);
  std::span<const float> rebuild(Communicator& communicator, const RebuildPlan& plan);
  void carry_out_rebuild();
  bool keep_for_later() noexcept;
  std::span<float> place_of(const Segment& segment);
  void commit_late(const StepVote::Outcome& outcome);

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
  std::uint32_t run = 0;        // its fingerprint, in every message
  int agreed_ranks = 0;         // ranks that were asked; 0: nobody yet
  int ranks = 0;                // of the last step that began
  StepVote::Outcome last_vote;  // of the last step that was committed
  // A step whose vote failed here: all is as before it, and it can still be committed.
  struct Doubt {
    Buffer<float> memory;       // by place in the model
    std::vector<char> settled;  // by bucket, before the vote failed
  };
  std::optional<Doubt> doubt;
  Buffer<float> late_mean;        // of such a step, once it is committed
  bool late_mean_is_new = false;  // nobody was given it
  // A rebuild that lacks the last word of others, who may have gone through with it.
  struct Rebuilding {
    RebuildPlan roster;
    RebuildPlan::Role role;
    StepVote::Outcome outcome;
    Bytes learnt;
    Pipeline fresh;
    int ranks;
  };
  std::optional<Rebuilding> rebuilding;
  std::uint32_t rebuilds = 0;
  StepStats stats;
  std::vector<std::size_t> everything;  // the numbers of all parameters, for `average`

  // How much was sent, step by step, and what comes next.
  tuning::Choices choices;
  struct Next {
    tuning::Level level;
    bool settled;
  };
  std::optional<Next> coming;
  std::optional<tuning::DensityController> controller;
  int prepared_ranks = 0;  // that the ladder is for
  struct Measured {
    std::uint64_t step = 0;
    tuning::Level level;
    tuning::Measurement taken;
  } measured;  // the last step, which the next vote tells

  // The order that buckets follow: reversed, until a step has been finished and so observed; that
  // of rank 0 then, agreed upon at the next `begin`.
  enum class Order { reversed, observed, agreed } order_is = Order::reversed;
  std::vector<std::size_t> order;
  BucketPlan plan;
  Bytes order_bytes;

  // The open step.
  Communicator* comm = nullptr;
  std::string dropped;  // why the last one was, until another begins
  bool voting = false;  // others may commit the step
  comm::Traffic traffic_before;
  float loss_scale = 1;
  bool knows_scale = true;
  Regime regime = Regime::compress;
  tuning::Level level;
  Budget budget;
  std::chrono::steady_clock::time_point opened_at, first_started, last_added;
  bool any_started = false;
  double worked = 0;            // seconds of a processor, in calls that do not wait
  double worked_meanwhile = 0;  // the same until the last gradient came
  tuning::ProcessorLoad processors;
  std::optional<std::chrono::steady_clock::time_point> finished_at;  // the step before
  std::optional<tuning::Measurement> vote_measured;  // of the last step, by all ranks
  exchange::Workspace workspace;
  StepVote vote;
  JointVote joint;
  std::function<bool()> allows;                  // asked before a commit; empty: nobody
  bool sound = true;                             // all that this rank brought so far is finite
  std::optional<std::uint64_t> parameters_seen;  // a fingerprint, if they are compared
  // What the caller handed over of a parameter.
  struct Held {
    std::span<float> gradient;
    float most = 0;
    bool lent = false;
    std::span<float> mean;
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
  std::vector<Bucket*> in_flight;  // whose exchange has not ended
  double weight_in_flight = 0;     // values that they send
  using Clock = std::chrono::steady_clock;
  Clock::time_point in_flight_since, last_ended;
  Clock::time_point last_looked;  // for messages
  Clock::duration pace{};         // see Reducer::pace
  StepStats running;
};

}  // namespace topreduce
