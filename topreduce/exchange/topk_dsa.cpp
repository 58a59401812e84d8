// Split and gather (SparCML's split all-gather, TopkDSA): the exact sum of what all ranks chose.
//
//   regions   rank 0 | rank 1 | rank 2          of equal width
//
//   split     everyone's entries to the owner of their region, who adds them in rank order
//   gather    the sums to everyone; regions that fill up travel whole (wire/message.h)
//
// Rounds: 2. Entries sent per rank: k (P-1)/P to split; to gather, from k (P-1)/P if all chose the
// same places up to k (P-1) if no two did, but never more bytes than the whole of its region.
// Drops nothing; the owner of a region owes the rounding of its sums.
//
// Renggli et al. 2019, arXiv 1802.08021; compared as TopkDSA in arXiv 2201.07598.

#include <algorithm>
#include <array>

#include "topreduce/catalog.h"
#include "topreduce/exchange/regions.h"

namespace topreduce::exchange {
namespace {

class TopkDsa final : public Exchange {
 public:
  explicit TopkDsa(const Layout& layout) : regions_(layout) {}

  void run(const Pending& pending, const SparseVector& selected, const select::Budget&,
           Courier& courier, Delivery& delivery) override {
    const auto pieces = regions_.pieces(pending.segments(), courier.ranks());
    const auto ranks = static_cast<std::size_t>(courier.ranks());
    outgoing_.resize(ranks);
    split(selected, pieces, outgoing_);
    courier.all_to_all(outgoing_, pieces, parts_);
    adder_.add(outgoing_, pending.size(), settling_[0]);
    adder_.add(parts_, pending.size(), reduced_);
    settling_[1].assign(reduced_);
    courier.all_gather(reduced_, pieces, parts_);
    take_from(reduced_, settling_[1]);  // the rounding of its sums is the owner's
    adder_.add(settling_, pending.size(), delivery.settled);
    adder_.add(parts_, pending.size(), delivery.sum);
  }

  Cost cost(double k, double size, int ranks) const override {
    const double split = k * (ranks - 1) / ranks;
    const double sums = std::min(k * (ranks - 1), size * (ranks - 1) / ranks);
    return {.rounds = 2, .values = split + sums, .indices = split + sums};
  }

 private:
  Regions regions_;
  Adder adder_;
  std::vector<SparseVector> outgoing_, parts_;
  SparseVector reduced_;
  std::array<SparseVector, 2> settling_;  // what was sent; what rounding changed
};

}  // namespace

std::unique_ptr<Exchange> make_topk_dsa(const Settings&, const Layout& layout) {
  return std::make_unique<TopkDsa>(layout);
}

}  // namespace topreduce::exchange
