// Ok-Topk: the sum is cut to the k strongest on its way, so traffic does not grow with the ranks.
//
//   regions   rank 0 |  rank 1  | rank 2          in each about equally many entries
//
//   split     everyone's entries to the owner of their region, who adds them in rank order
//   cut       the owner keeps the sums that are among the k strongest of all regions
//   gather    the survivors to everyone; if they crowd on few ranks, over all of them: an even part
//             to each rank, who hands it on as it came
//
// Rounds: 2; 3 to balance; two more every `tau` steps, in which the ranks agree on regions; and,
// for the whole model at once, nine more every `period` steps, in which they find the exact k-th
// sum. Entries sent per rank: k (P-1)/P to split, as many to gather, at most as many to balance.
// Drops sums below the cut: they stay owed by the ranks that sent them. Settled is what a rank sent
// and everyone got, and the owner of a region owes the rounding of its sums.
//
// Between exact steps the cut is reused, and lowered as in the authors' code. When buckets come one
// by one, an exact step serves the next one: there owners also show sums down to 3/4 of the cut, so
// that all ranks know the k-th of the model. Balancing follows the parts of the last step, which
// everyone saw; so no round is spent on telling sizes.
//
// Li and Hoefler 2022, arXiv 2201.07598.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "topreduce/catalog.h"
#include "topreduce/exchange/all_reduce.h"
#include "topreduce/exchange/global_cut.h"
#include "topreduce/exchange/regions.h"
#include "topreduce/floating.h"
#include "topreduce/state_range.h"

namespace topreduce::exchange {
namespace {

constexpr std::size_t kFewest = 16;  // entries of one rank that another carries
constexpr double kFarOff = 2;        // counts beyond this factor of the budget are far off
constexpr double kShown = 0.75;      // of the cut: down to here sums are shown at an exact step
constexpr char kOtherState[] =
    "the ranks hand over different parameters (all must add the same ones in every step), "
    "or do not share one cut and one set of regions (load states of the same step on all)";
constexpr double kSteepness = 0.3;  // threshold ~ budget^-0.3, when the budget itself changes

struct Control {
  std::uint64_t tau, period;
  double low, high, factor, ratio, balance;
};

// Appends the entries that pass.
template <class Passes>
void append_if(const SparseVector& entries, Passes&& passes, SparseVector& kept) {
  std::size_t out = kept.size();
  kept.resize(out + entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (!passes(entries.indices[i], entries.values[i])) continue;
    kept.indices[out] = entries.indices[i];
    kept.values[out++] = entries.values[i];
  }
  kept.resize(out);
}

auto at_least(double threshold) {
  const float cut = to_magnitude(threshold);
  return [cut](Index, float value) { return std::abs(value) >= cut; };
}

// Keeps the entries of `mine` that `delivered` holds too. Both ascend, so one walk finds them all.
void intersect(SparseVector& mine, const SparseVector& delivered) {
  std::size_t out = 0, j = 0;
  for (std::size_t i = 0; i < mine.size(); ++i) {
    while (j < delivered.size() && delivered.indices[j] < mine.indices[i]) ++j;
    if (j == delivered.size()) break;
    if (delivered.indices[j] != mine.indices[i]) continue;
    mine.indices[out] = mine.indices[i];
    mine.values[out++] = mine.values[i];
  }
  mine.resize(out);
}

class OkTopk final : public Exchange {
 public:
  OkTopk(const Control& control, const Layout& layout)
      : control_(control), model_(std::max<std::size_t>(1, layout.size())), regions_(layout) {}

  void begin(const Budget& budget) override {
    at_once_ = budget.exchanges == Budget::Exchanges::one;
    const auto wanted = std::llround(control_.ratio * static_cast<double>(budget.entries));
    k_ = std::clamp<std::size_t>(static_cast<std::size_t>(wanted), 1,
                                 std::max<std::size_t>(1, budget.model));
    all_ = k_ >= budget.model;
    cut_ = all_ ? 0 : threshold_ * std::pow(last_k_ / static_cast<double>(k_), kSteepness);
    exact_ = !all_ && (due_ != 0 || budget.step % control_.period == 0);
    agree_ = agreed_ == 0 || budget.step % control_.tau == 0;
    regions_.begin();
    counts_.clear();
    magnitudes_.clear();
    delivered_ = 0;
  }

  Task run(const CompensatedGradient& compensated, const SparseVector& selected, const Budget&,
           Channel& channel, Result& result) override {
    Workspace& work = channel.workspace();
    const auto regions = work.regions.take(channel.number());
    const auto sent = work.vectors.take(channel.number()),
               reduced = work.vectors.take(channel.number());
    const auto rounding = work.vectors.take(channel.number()),
               rounded = work.vectors.take(channel.number());
    const auto own = comm::at(channel.rank());
    const std::size_t ranks = comm::at(channel.ranks());

    // Split: afterwards `reduced` holds the sums of this rank's regions, `sent` what it sent.
    channel.expect_same(Fingerprint()
                            .add(k_)
                            .add(std::bit_cast<std::uint64_t>(cut_))
                            .add(std::bit_cast<std::uint64_t>(skew_))
                            .add(exact_)
                            .add(agree_),
                        kOtherState);
    if (agree_) {
      const auto bounds = bounds_.take(channel.number());
      regions_.propose(compensated.segments(), selected, *bounds);
      co_await all_reduce(channel, wire::ValueFormat::fp32, *bounds, {});
      regions_.learn(compensated.segments(), *bounds);
    }
    regions_.map(compensated.segments(), channel.ranks(), *regions);
    Fingerprint ends;
    for (const Regions::Piece& piece : regions->pieces) ends.add(piece.end);
    channel.expect_same(ends, kOtherState);
    outgoing_.resize(ranks);
    split(selected, regions->pieces, outgoing_);
    const auto to_owners = channel.send_to_each(outgoing_, *regions, rounded_);
    work.adder.add(rounded_, compensated.size(), *sent);
    rounded->assign(outgoing_[own]);
    co_await channel.arrival(to_owners);
    channel.read_from_each(to_owners, *regions, *rounded, work.incoming);
    work.adder.add(work.incoming, compensated.size(), *reduced);

    // Cut.
    bool crowded = skew_ > control_.balance;
    rounding->clear();
    if (exact_ && at_once_) {
      co_await global_.find(*reduced, k_, channel);
      append_if(
          *reduced, [&](Index i, float value) { return global_.keeps(i, value); }, *rounding);
      crowded = skew_of(global_.counts()) > control_.balance;
    } else {
      append_if(*reduced, at_least(exact_ ? kShown * cut_ : cut_), *rounding);
    }

    // Gather.
    if (control_.balance > 0 && crowded && ranks > 1) {
      // Not less than some entries to each: what stands around them travels to everyone, too.
      const std::size_t together = channel.values_per_scale();
      const std::size_t grain = (kFewest + together - 1) / together * together;
      deal_out(*rounding, regions->pieces, own, grain, outgoing_);
      const auto to_carriers = channel.send_to_carriers(outgoing_, *regions, rounded_);
      work.adder.add(rounded_, compensated.size(), *rounded);
      co_await channel.arrival(to_carriers);
      const auto to_all = channel.carry_to_all(to_carriers);
      co_await channel.arrival(to_all);
      channel.read_carried(to_all, *regions, *rounded, work.incoming);
    } else {
      const auto to_all = channel.send_to_all(regions->owned[own], *rounding, *rounded);
      co_await channel.arrival(to_all);
      channel.read_from_all(
          to_all, [&](int r) { return wire::Pieces(regions->owned[comm::at(r)]); }, *rounded,
          work.incoming);
    }
    to_rounding_error(*rounded, *rounding);
    work.adder.add(work.incoming, compensated.size(), shown_);
    remember(shown_);
    result.sum.clear();
    if (exact_ && !at_once_) {
      append_if(shown_, at_least(cut_), result.sum);
    } else {
      result.sum.assign(shown_);
    }
    settle(compensated.size(), *sent, *rounding, work.adder, result);
    delivered_ += static_cast<double>(result.sum.size());
    counts_.resize(ranks);
    count_by_owner(result.sum, regions->pieces, counts_);
  }

  Cost cost(double k, double, int ranks) const override {
    const double entries = (1 + control_.ratio) * k * (ranks - 1) / ranks;
    return {.rounds = 2, .values = entries, .indices = entries};
  }

  void commit() override {
    regions_.commit();
    agreed_ = 1;
    skew_ = skew_of(counts_);
    if (all_) return;
    const auto k = static_cast<double>(k_);
    last_k_ = k;
    due_ = 0;
    if (exact_ && at_once_) {
      threshold_ = global_.magnitude();
    } else if (exact_) {
      due_ = magnitudes_.size() < k_ ? 1 : 0;
      threshold_ = due_ == 0 ? kernels::kth_magnitude(magnitudes_, k_) : cut_ / 2;
    } else {
      steer(k);
    }
  }

  void visit(StateVisitor& visitor) override {
    visit_number(visitor, "ok_topk.threshold", threshold_, state_range::kThreshold);
    visit_number(visitor, "ok_topk.budget", last_k_, state_range::entries_of(model_));
    visit_number(visitor, "ok_topk.due", due_, state_range::kFlag);
    visit_number(visitor, "ok_topk.skew", skew_, {0, 0x1p32});
    visit_number(visitor, "ok_topk.agreed", agreed_, state_range::kFlag);
    regions_.visit("ok_topk.bound", visitor);
  }

 private:
  // The largest part in units of the mean.
  static double skew_of(const auto& counts) {
    double largest = 0, total = 0;
    for (const auto count : counts) {
      largest = std::max(largest, static_cast<double>(count));
      total += static_cast<double>(count);
    }
    return total > 0 ? largest * static_cast<double>(counts.size()) / total : 0;
  }

  void remember(const SparseVector& shown) {
    const std::size_t before = magnitudes_.size();
    make_room(magnitudes_, before + shown.size());
    magnitudes_.insert(magnitudes_.end(), shown.values.begin(), shown.values.end());
  }

  // What this rank sent and everyone got; as owner, also the rounding of what everyone got.
  void settle(Index universe, SparseVector& sent, SparseVector& rounding, Adder& adder,
              Result& result) {
    intersect(sent, result.sum);
    intersect(rounding, result.sum);
    settling_[0].assign(sent);
    settling_[1].assign(rounding);
    adder.add(settling_, universe, result.settled);
  }

  // Between exact steps. Where too many were delivered, everyone has seen the k-th of them; the
  // authors raise the threshold by a factor, which sums of growing debts outrun.
  void steer(double k) {
    threshold_ = cut_;
    if (delivered_ > control_.high * k) {
      threshold_ = kernels::kth_magnitude(magnitudes_, k_);
    } else if (delivered_ < control_.low * k) {
      threshold_ /= control_.factor;
      due_ = cut_ > 0 && delivered_ < k / kFarOff ? 1 : 0;
    }
  }

  Control control_;
  std::size_t model_;  // entries
  Regions regions_;
  GlobalCut global_;
  Pool<Buffer<float>> bounds_;

  // The open step.
  std::size_t k_ = 1;     // entries of the sum that should survive
  bool at_once_ = false;  // one exchange for the whole model
  bool all_ = false;      // every sum survives
  bool exact_ = true;     // the k-th sum is found anew
  bool agree_ = true;     // regions are agreed on anew
  double cut_ = 0;
  double delivered_ = 0;
  std::vector<double> counts_;  // delivered, by owner
  Buffer<float> magnitudes_;    // of all sums that everyone saw
  // Not kept across a wait:
  Parts outgoing_, rounded_;
  SparseVector shown_;
  std::array<SparseVector, 2> settling_;

  // For the next step.
  double threshold_ = 0;
  double last_k_ = 1;
  double due_ = 1;     // 1: it must be exact
  double agreed_ = 0;  // 1: the ranks have agreed on regions
  double skew_ = 0;    // the largest part, in units of the mean
};

}  // namespace

std::unique_ptr<Exchange> make_ok_topk(const Settings& settings, const Layout& layout) {
  const Control control{settings.integer("tau"),          settings.integer("period"),
                        settings.number("global_low"),    settings.number("global_high"),
                        settings.number("global_factor"), settings.number("global_ratio"),
                        settings.number("balance")};
  return std::make_unique<OkTopk>(control, layout);
}

}  // namespace topreduce::exchange
