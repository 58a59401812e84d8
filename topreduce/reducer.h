#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "topreduce/comm/communicator.h"
#include "topreduce/layout.h"
#include "topreduce/participation.h"
#include "topreduce/rebuild.h"
#include "topreduce/spec.h"
#include "topreduce/state.h"
#include "topreduce/stats.h"

namespace topreduce {

class Device;

/// Averages a model's gradients over the ranks, one step at a time.
///
///   reducer.begin(comm);
///   while (backward pass) reducer.add(parameters, gradient);   // as they become ready
///   reducer.finish();                                          // every gradient is now the mean
///
/// The model is exchanged in buckets of its own (`bucket_cap_mb`), each as soon as its gradients
/// are there and those before it are on their way. Buckets follow the reversed layout in the first
/// step, and from then on the order in which rank 0 added its gradients in that step.
///
/// A step is a transaction: whatever throws between `begin` and the vote in `finish` leaves what is
/// owed, and the gradients, bit for bit as they were. What follows the vote cannot fail in main
/// memory; if a device (device.h) breaks it off, part of the step is committed, and no further step
/// begins until a state is loaded. Results do not depend on buckets and their order, nor on the
/// caller's floating-point mode. One thread at a time.
class TOPREDUCE_API Reducer {
 public:
  /// `method` is a spec such as "topk:density=0.01"; see catalog.def for all words.
  /// Throws std::invalid_argument for unknown words, values out of range and stages that do not
  /// fit.
  Reducer(Layout layout, const Spec& method);
  Reducer(Layout layout, std::string_view method);
  ~Reducer();
  Reducer(Reducer&&) noexcept;
  Reducer& operator=(Reducer&&) noexcept;

  /// Compares version, model and settings over the ranks; std::invalid_argument on every rank, with
  /// the difference by rank, if they differ. Collective. The first `begin`
  /// does it by itself, as does the first with another number of ranks. Not while a step is open.
  void agree(Communicator& comm);

  /// For a model whose parts (shards) are averaged apart from each other: from now on a step
  /// commits only if it does on all ranks of `others` as well, one for each part, which must
  /// outlive this. They must all make the same steps. Null: this is the whole model. Not while a
  /// step is open.
  void commit_with(Communicator* others);

  /// From now on `allows` is asked on this rank before a step is committed, when all ranks have
  /// voted for it. If it says no, `finish` throws CommError and nothing has changed here; other
  /// ranks may have committed, so this one must not go on without `rebuild`. Empty: nobody is
  /// asked.
  void commit_if(std::function<bool()> allows);

  /// Opens a step. `loss_scale`: gradients come multiplied by it, and so does the mean; what is
  /// owed is kept without it. 0 on a rank that does not know it, because it has run out of data,
  /// and takes that of the others. Where `most` of `add` matters it must be the same on all ranks.
  void begin(Communicator& comm, float loss_scale = 1);

  /// Hands over the gradients of some parameters (numbers in the layout), one after the other in
  /// `gradient`, which must stay alive and untouched until `finish` or `relocate`. Every parameter
  /// once per step, in any grouping and order, which may differ between ranks. `most`: the largest
  /// magnitude of a mean that the caller can use (65504 if it goes on in fp16); see `finish`.
  void add(std::span<const std::size_t> parameters, std::span<float> gradient,
           float most = std::numeric_limits<float>::max());

  /// Between `add` and `finish`: the gradients of these parameters now lie, bit for bit the same,
  /// one after the other in `gradient`, and their means are to go there. Where they were before is
  /// not looked at again. Not for gradients on a device.
  void relocate(std::span<const std::size_t> parameters, std::span<float> gradient);

  /// As `add`, for memory that the caller does not need. What is owed is then updated while the
  /// backward pass goes on; its old values are kept in this memory, in case the step fails. After a
  /// step that failed it holds zeros, or nothing of use. `deliver_to` is for lent memory alone.
  void lend(std::span<const std::size_t> parameters, std::span<float> gradient,
            float most = std::numeric_limits<float>::max());
  /// Whether lending saves anything; if not, `add` is as good.
  bool borrows() const;
  /// Between `lend` and `finish`: the means of these parameters go to `means`, one after the other,
  /// where zeros are now, instead of the place that was lent. They may be written there before
  /// `finish`; after a step that failed, what is there is of no use.
  void deliver_to(std::span<const std::size_t> parameters, std::span<float> means);

  /// As `add`, for gradients that the device of `use` holds; see `on_device`.
  void add_on_device(std::span<const std::size_t> parameters,
                     float most = std::numeric_limits<float>::max());

  /// Goes on with exchanges whose messages have come, without waiting; `add` and `finish` do that
  /// too. Returns whether any are still under way.
  bool progress();
  /// While gradients come, looking for messages once in so many seconds is enough: `add` looks no
  /// sooner, and what is ready in between travels together. Follows from how long the gradients of
  /// the last step took to come.
  double pace() const;

  /// Says of the open step, before `finish`, that this rank left parameters unused, or has
  /// run out of data. What no rank used is not delivered: its gradient and what is owed stay. May
  /// be called again for further parameters.
  void participate(const Participation& participation);

  /// Has the open step compare over the ranks, before anything is committed, the sums that everyone
  /// applies and a `fingerprint` of the caller's parameters, which all ranks must hold alike:
  /// `finish` throws DriftError on every rank, with those that differ. All ranks in the same steps.
  void verify(std::uint64_t fingerprint);

  /// Votes, commits, and replaces every gradient with the mean over the ranks. If any rank had an
  /// infinity or NaN, or gradients so large (2^90 / ranks) that sums might become one, nothing is
  /// committed and every gradient becomes NaN, on all ranks. So it is if a mean exceeds its `most`
  /// and there is a loss scale, which must be lowered, or the memory cannot owe the rest; otherwise
  /// the mean is cut to `most`, and the rest stays owed.
  const StepStats& finish();

  /// After `finish`, for density=auto: what the caller has measured of that step, in seconds: from
  /// its start to its last gradient, and from then until it had the means. Otherwise it is from
  /// `begin` to the last `add`, with `average` since the last step, and from there to the end of
  /// `finish`. Each rank tells its own.
  void timed(double computed, double waited);

  /// A whole step for a model whose gradients lie in one piece, in layout order.
  const StepStats& average(Communicator& comm, std::span<float> gradient);

  /// From now on gradients live on `device` (device.h), which must outlive this; null: in main
  /// memory. Moves what is owed there, if the method can work there. Not while a step is open.
  void use(Device* device);
  /// Whether gradients are to stay on the device; otherwise they must be handed over in main
  /// memory. `configure` may change it.
  bool on_device() const;

  /// Drops an open step, as an exception does. `why` stands in the error of a call that still
  /// expects it.
  void abandon(std::string_view why = {}) noexcept;

  /// After a CommError, or when ranks come or go: what the ranks of a new group have to do to go on
  /// together. Changes nothing, unless a `rebuild` failed here that others went through with: then
  /// it is carried out now. Collective over the new ranks; std::invalid_argument on all of them if
  /// they differ in model or settings. Then the caller copies its parameters from a rank that is on
  /// time to those that are not, and all call `rebuild`.
  RebuildPlan plan_rebuild(Communicator& comm);

  /// Carries it out. A rank that is late commits the step that others have, with the sums that it
  /// has itself; one that joins takes over what the leader has learnt, and owes nothing. What the
  /// others owe is scaled so that its mean over the ranks stays. If it throws, nothing has changed
  /// here: make another plan, with the ranks that are left. Returns the mean of that step on a rank
  /// that was late, in layout order, until the next `begin`. Collective.
  std::span<const float> rebuild(Communicator& comm, const RebuildPlan& plan);

  /// Goes on as if `step` were next; what is owed stays. For ranks for which others make the steps.
  void skip_to(std::uint64_t step);

  /// Changes settings between steps, e.g. "density=0.001"; what is owed stays. On a mistake nothing
  /// changes. All ranks must do the same before their next step: call `agree` to be sure. Only
  /// "threads", given alone, is each rank's own affair.
  void configure(const Spec& changes);

  /// Bypassed, steps are plain dense averages and what is owed waits.
  enum class Mode { compress, bypass };
  void set_mode(Mode mode);
  Mode mode() const;

  /// Parameters that are exchanged together, in the order of the next step; a `begin` may change
  /// it.
  std::vector<std::vector<std::size_t>> buckets() const;
  const Layout& layout() const;
  const Layout& remembered() const;  ///< what memory spans: all parameters but those of keep_dense
  const Spec& spec() const;          ///< every setting, defaults included
  const StepStats& stats() const;    ///< of the last finished step
  /// Parameters that no rank used in the last finished step, so that their gradients stayed.
  std::vector<std::size_t> unused() const;
  std::uint64_t step() const;  ///< number of the next step
  double density() const;      ///< of the next step: 1 while warming up, falling in the ramp
  /// What the next step sends, in a word: its density, or for all entries their format.
  std::string level() const;
  std::string reason() const;  ///< why that, in words
  /// The levels of all steps so far, as a list that `density` takes: "0.0313*12 0.0625 int8*100".
  std::string choices() const;
  std::span<const float> owed() const;  ///< flat over `remembered`; empty for feedback "none"

  /// Shows everything the next step depends on, for checkpoints. Not while a step is open. An
  /// impossible number that a visit fills in is std::invalid_argument; see StateVisitor::Purpose.
  void visit(StateVisitor& visitor);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace topreduce
