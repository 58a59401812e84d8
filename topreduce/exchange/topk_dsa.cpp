// Split and gather (SparCML's split all-gather, TopkDSA): the exact sum of what all ranks chose.
//
//   regions   rank 0 | rank 1 | rank 2          of equal width
//
//   split     everyone's entries to the owner of their region, who adds them in rank order
//   gather    the sums to everyone; regions that fill up travel whole (wire/payload.h)
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

  Task run(const CompensatedGradient& compensated, const SparseVector& selected, const Budget&,
           Channel& channel, Result& result) override {
    Workspace& work = channel.workspace();
    const auto regions = work.regions.take(channel.number());
    const auto sent = work.vectors.take(channel.number()),
               rounding = work.vectors.take(channel.number());
    const auto rounded = work.vectors.take(channel.number());
    regions_.map(compensated.segments(), channel.ranks(), *regions);
    outgoing_.resize(comm::at(channel.ranks()));
    split(selected, regions->pieces, outgoing_);
    const auto to_owners = channel.send_to_each(outgoing_, *regions, rounded_);
    work.adder.add(rounded_, compensated.size(), *sent);
    rounding->assign(outgoing_[comm::at(channel.rank())]);
    co_await channel.arrival(to_owners);

    channel.read_from_each(to_owners, *regions, *rounding, work.incoming);
    work.adder.add(work.incoming, compensated.size(), *rounding);
    const auto to_all =
        channel.send_to_all(regions->owned[comm::at(channel.rank())], *rounding, *rounded);
    to_rounding_error(*rounded, *rounding);  // the rounding of its sums is the owner's
    co_await channel.arrival(to_all);

    channel.read_from_all(
        to_all, [&](int r) { return wire::Pieces(regions->owned[comm::at(r)]); }, *rounded,
        work.incoming);
    work.adder.add(work.incoming, compensated.size(), result.sum);
    settling_[0].assign(*sent);
    settling_[1].assign(*rounding);
    work.adder.add(settling_, compensated.size(), result.settled);
  }

  Cost cost(double k, double size, int ranks) const override {
    const double split = k * (ranks - 1) / ranks;
    const double sums = std::min(k * (ranks - 1), size * (ranks - 1) / ranks);
    return {.rounds = 2, .values = split + sums, .indices = split + sums};
  }

 private:
  Regions regions_;
  // Not kept across a wait:
  Parts outgoing_, rounded_;
  std::array<SparseVector, 2> settling_;  // what was sent; what rounding changed
};

}  // namespace

std::unique_ptr<Exchange> make_topk_dsa(const Settings&, const Layout& layout) {
  return std::make_unique<TopkDsa>(layout);
}

}  // namespace topreduce::exchange
