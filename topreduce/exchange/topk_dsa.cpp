// Split and gather (SparCML's split all-gather, TopkDSA): the exact sum of what all ranks chose.
//
//   regions   rank 0 | rank 1 | rank 2          of equal width
//
//   split     everyone's entries to the owner of their region, who adds them in rank order
//   gather    the sums to everyone: as entries or, where that is smaller, as the whole region
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
    courier.all_to_all(outgoing_, parts_);
    adder_.add(outgoing_, pending.size(), settling_[0]);
    adder_.add(parts_, pending.size(), reduced_);
    round_sums(courier);
    adder_.add(settling_, pending.size(), delivery.settled);

    sizes_.assign(ranks, 0);
    for (const Regions::Piece& piece : pieces) sizes_[piece.owner] += piece.end - piece.begin;
    number_within(static_cast<std::size_t>(courier.rank()), pieces);
    courier.all_gather_regions(reduced_, sizes_, parts_);
    number_overall(pieces);
    adder_.add(parts_, pending.size(), delivery.sum);
  }

  Cost cost(double k, double size, int ranks) const override {
    const double split = k * (ranks - 1) / ranks;
    const double sums = std::min(k * (ranks - 1), size * (ranks - 1) / ranks);
    return {.rounds = 2, .values = split + sums, .indices = split + sums};
  }

 private:
  // The sums as receivers read them; this rank owes what that changes.
  void round_sums(Courier& courier) {
    settling_[1].clear();
    if (!courier.rounds_values()) return;
    settling_[1].assign(reduced_);
    courier.round(reduced_.values);
    for (std::size_t i = 0; i < reduced_.size(); ++i) {
      settling_[1].values[i] = reduced_.values[i] - settling_[1].values[i];
    }
  }

  // From places in the exchange to places in this rank's region; zeros stay at home.
  void number_within(std::size_t rank, std::span<const Regions::Piece> pieces) {
    std::size_t i = 0, out = 0;
    Index before = 0;
    for (const Regions::Piece& piece : pieces) {
      if (piece.owner != rank) continue;
      for (; i < reduced_.size() && reduced_.indices[i] < piece.end; ++i) {
        if (reduced_.values[i] == 0) continue;
        reduced_.indices[out] = reduced_.indices[i] - piece.begin + before;
        reduced_.values[out++] = reduced_.values[i];
      }
      before += piece.end - piece.begin;
    }
    reduced_.resize(out);
  }

  // And back, for all ranks.
  void number_overall(std::span<const Regions::Piece> pieces) {
    next_.assign(parts_.size(), 0);
    before_.assign(parts_.size(), 0);
    for (const Regions::Piece& piece : pieces) {
      SparseVector& part = parts_[piece.owner];
      Index& before = before_[piece.owner];
      const Index end = before + (piece.end - piece.begin);
      for (std::size_t& i = next_[piece.owner]; i < part.size() && part.indices[i] < end; ++i) {
        part.indices[i] = part.indices[i] - before + piece.begin;
      }
      before = end;
    }
  }

  Regions regions_;
  Adder adder_;
  std::vector<SparseVector> outgoing_, parts_;
  SparseVector reduced_;
  std::array<SparseVector, 2> settling_;  // what was sent; what rounding changed
  std::vector<std::size_t> sizes_, next_;
  std::vector<Index> before_;
};

}  // namespace

std::unique_ptr<Exchange> make_topk_dsa(const Settings&, const Layout& layout) {
  return std::make_unique<TopkDsa>(layout);
}

}  // namespace topreduce::exchange
