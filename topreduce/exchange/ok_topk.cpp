// Ok-Topk: the sum is cut to the k strongest on its way, so traffic does not grow with the ranks.
//
//   regions   rank 0 |  rank 1  | rank 2          in each about equally many entries
//
//   split     everyone's entries to the owner of their region, who adds them in rank order
//   cut       the owner keeps the sums that are among the k strongest of all regions
//   gather    the survivors to everyone; if they crowd on few ranks, over all of them: an even part
//             to each rank, who hands it on as it came
//
// Rounds: 2; 3 to balance; one more every `tau` steps, in which the ranks agree on regions; and,
// for the whole model at once, two more every `period` steps, in which they find the exact k-th
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
#include "topreduce/exchange/global_cut.h"
#include "topreduce/exchange/regions.h"
#include "topreduce/floating.h"
#include "topreduce/state_range.h"

namespace topreduce::exchange {
namespace {

constexpr double kFarOff = 2;    // counts beyond this factor of the budget are far off
constexpr double kShown = 0.75;  // of the cut: down to here sums are shown at an exact step
constexpr char kOtherState[] =
    "the ranks hand over different parameters (all must add the same buckets in the same order), "
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
  OkTopk(const Control& control, const Layout& layout) : control_(control), regions_(layout) {}

  void begin(const select::Budget& budget) override {
    at_once_ = budget.exchanges == select::Budget::Exchanges::one;
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

  void run(const Pending& pending, const SparseVector& selected, const select::Budget&,
           Courier& courier, Delivery& delivery) override {
    const auto pieces = reduce(pending, selected, courier);
    bool crowded = skew_ > control_.balance;
    shown_.clear();
    if (exact_ && at_once_) {
      global_.find(reduced_, k_, courier);
      append_if(
          reduced_, [&](Index i, float value) { return global_.keeps(i, value); }, shown_);
      crowded = skew_of(global_.counts()) > control_.balance;
    } else {
      append_if(reduced_, at_least(exact_ ? kShown * cut_ : cut_), shown_);
    }
    rounding_.assign(shown_);
    std::vector<SparseVector>* parts = &parts_;
    if (control_.balance > 0 && crowded && courier.ranks() > 1) {
      for (SparseVector& part : outgoing_) part.reserve(shown_.indices.capacity());
      deal_out(shown_, pieces, static_cast<std::size_t>(courier.rank()), courier.values_per_scale(),
               outgoing_);
      courier.all_gather_spread(outgoing_, pieces, spread_);
      adder_.add(outgoing_, pending.size(), shown_);
      parts = &spread_;
    } else {
      courier.all_gather(shown_, pieces, parts_);
    }
    take_from(shown_, rounding_);
    if (exact_ && !at_once_) {
      adder_.add(*parts, pending.size(), shown_);
      delivery.sum.clear();
      append_if(shown_, at_least(cut_), delivery.sum);
      remember(shown_);
    } else {
      adder_.add(*parts, pending.size(), delivery.sum);
      remember(delivery.sum);
    }
    settle(pending.size(), delivery);
    delivered_ += static_cast<double>(delivery.sum.size());
    counts_.resize(static_cast<std::size_t>(courier.ranks()));
    count_by_owner(delivery.sum, pieces, counts_);
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
    visit_number(visitor, "ok_topk.budget", last_k_, state_range::kEntries);
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

  // Split: afterwards reduced_ holds the sums of this rank's regions, sent_ what this rank sent.
  std::span<const Regions::Piece> reduce(const Pending& pending, const SparseVector& selected,
                                         Courier& courier) {
    courier.expect_same(Fingerprint()
                            .add(k_)
                            .add(std::bit_cast<std::uint64_t>(cut_))
                            .add(std::bit_cast<std::uint64_t>(skew_))
                            .add(exact_)
                            .add(agree_),
                        kOtherState);
    if (agree_) {
      regions_.propose(pending.segments(), selected, shown_);
      courier.all_gather_exact(shown_, parts_);
      regions_.learn(pending.segments(), parts_);
    }
    const auto pieces = regions_.pieces(pending.segments(), courier.ranks());
    Fingerprint bounds;
    for (const Regions::Piece& piece : pieces) bounds.add(piece.end);
    courier.expect_same(bounds, kOtherState);
    outgoing_.resize(static_cast<std::size_t>(courier.ranks()));
    split(selected, pieces, outgoing_);
    courier.all_to_all(outgoing_, pieces, parts_);
    adder_.add(outgoing_, pending.size(), sent_);
    adder_.add(parts_, pending.size(), reduced_);
    return pieces;
  }

  void remember(const SparseVector& shown) {
    const std::size_t before = magnitudes_.size();
    make_room(magnitudes_, before + shown.size());
    magnitudes_.insert(magnitudes_.end(), shown.values.begin(), shown.values.end());
  }

  // What this rank sent and everyone got; as owner, also the rounding of what everyone got.
  void settle(Index universe, Delivery& delivery) {
    intersect(sent_, delivery.sum);
    intersect(rounding_, delivery.sum);
    settling_[0].assign(sent_);
    settling_[1].assign(rounding_);
    adder_.add(settling_, universe, delivery.settled);
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
  Regions regions_;
  GlobalCut global_;
  Adder adder_;

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
  std::vector<SparseVector> outgoing_, parts_, spread_;
  SparseVector sent_, reduced_, rounding_, shown_;
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
