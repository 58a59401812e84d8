// gTop-k: sums travel up a tree and are cut to the k strongest at every meeting; the root tells
// all.
//
//   round 1   0 <- 1   2 <- 3   4          each pair adds up and keeps the k strongest
//   round 2   0 <----- 2        4
//   round 3   0 <-------------- 4          any number of ranks
//   and back  0 -> 4, 0 -> 2, 0 -> 1 and 2 -> 3
//
// Rounds: 2 ceil(log2 P). Entries sent by the busiest rank, the root: k ceil(log2 P).
// Drops what a meeting cuts. The published method returns to each rank what it sent and the root
// does not list, and loses what was cut on one branch but came through on another. Here the rank
// that cuts an entry owes it from then on, so nothing is lost.
// When buckets come one by one, a meeting keeps of each parameter as many entries as the richer of
// the two had, which does not depend on the cut into buckets.
//
// Shi et al. 2019, arXiv 1901.04359.

#include <algorithm>
#include <array>
#include <bit>

#include "topreduce/catalog.h"
#include "topreduce/topk_filter.h"

namespace topreduce::exchange {
namespace {

class GTopk final : public Exchange {
 public:
  Task run(const CompensatedGradient& compensated, const SparseVector& selected,
           const Budget& budget, Channel& channel, Result& result) override {
    // A budget for everything cuts nothing, however the entries lie.
    const bool at_once =
        budget.exchanges == Budget::Exchanges::one || budget.entries >= budget.model;
    const int rank = channel.rank(), ranks = channel.ranks(), rounds = rounds_up(ranks);
    Workspace& work = channel.workspace();
    const auto sum = work.vectors.take(channel.number()),
               rounded = work.vectors.take(channel.number());
    // What changes on this rank's way: its own entries, then all that it cuts and rounds.
    const auto changes = work.parts.take(channel.number());
    changes->resize(comm::at(rounds) + 2);
    for (SparseVector& change : *changes) change.clear();
    (*changes)[0].assign(selected);
    sum->assign(selected);

    for (int round = 0; round < rounds; ++round) {
      const int stride = 1 << round, place = rank % (2 * stride);
      const bool sends = place == stride, receives = place == 0 && rank + stride < ranks;
      if (!sends && !receives) continue;
      const int to = sends ? rank - stride : Channel::kNobody;
      const int from = receives ? rank + stride : Channel::kNobody;
      channel.number_next_round(static_cast<std::uint32_t>(round));
      const auto meeting = channel.send(to, *sum, *rounded, from);
      if (sends) {
        changes->back().assign(*sum);
        to_rounding_error(*rounded, changes->back());
        break;  // the sum is the other's now
      }
      co_await channel.arrival(meeting);
      channel.read(meeting, from, received_);
      channel.close(meeting);
      merge(compensated, at_once ? budget.entries : 0, *sum, (*changes)[comm::at(round) + 1]);
    }
    // The root rounds for everyone; the others hand on what they got as it came.
    const auto payload = work.payloads.take(channel.number());
    payload->clear();
    if (rank == 0) {
      changes->back().assign(*sum);
      rounded->assign(*sum);
      if (ranks > 1) channel.encode(channel.parameters(), *sum, *rounded, *payload);
      to_rounding_error(*rounded, changes->back());
      result.sum.assign(*rounded);
    }
    for (int round = rounds; round-- > 0;) {
      const int stride = 1 << round, place = rank % (2 * stride);
      const bool sends = place == 0 && rank + stride < ranks, receives = place == stride;
      if (!sends && !receives) continue;
      const int to = sends ? rank + stride : Channel::kNobody;
      const int from = receives ? rank - stride : Channel::kNobody;
      channel.number_next_round(static_cast<std::uint32_t>(2 * rounds - round));
      const auto handing = channel.send_payload(to, *payload, from);
      if (!receives) continue;
      co_await channel.arrival(handing);
      const auto came = channel.payload(handing, from);
      payload->assign(came.begin(), came.end());
      channel.read(handing, from, result.sum);
      channel.close(handing);
    }
    work.adder.add(*changes, compensated.size(), result.settled);
  }

  Cost cost(double k, double, int ranks) const override {
    const int rounds = rounds_up(ranks);
    return {.rounds = 2 * static_cast<std::uint64_t>(rounds),
            .values = k * rounds,
            .indices = k * rounds};
  }

 private:
  static int rounds_up(int ranks) {
    return static_cast<int>(std::bit_width(static_cast<unsigned>(ranks - 1)));
  }

  // Adds received_ to `sum` and cuts: to the k strongest or, with k = 0, by parameter.
  void merge(const CompensatedGradient& compensated, std::size_t k, SparseVector& sum,
             SparseVector& cut) {
    meeting_[0].assign(sum);
    meeting_[1].assign(received_);
    adder_.add(meeting_, compensated.size(), merged_);
    sum.clear();
    if (k > 0) {
      keep(merged_, 0, merged_.size(), k, sum, cut);
      return;
    }
    std::size_t first = 0, of_mine = 0, of_theirs = 0;
    for (const Segment& segment : compensated.segments()) {
      const std::size_t last = end_of_range(merged_.indices, first, segment.end());
      const std::size_t mine = end_of_range(meeting_[0].indices, of_mine, segment.end());
      const std::size_t theirs = end_of_range(meeting_[1].indices, of_theirs, segment.end());
      keep(merged_, first, last, std::max(mine - of_mine, theirs - of_theirs), sum, cut);
      first = last;
      of_mine = mine;
      of_theirs = theirs;
    }
  }

  // Appends the k strongest of a range to `sum`, ties to the lower index, and the rest, negative,
  // to `cut`.
  static void keep(const SparseVector& entries, std::size_t first, std::size_t last, std::size_t k,
                   SparseVector& sum, SparseVector& cut) {
    const std::size_t count = last - first, kept = std::min(k, count);
    if (count == 0) return;
    TopkFilter strongest({entries.values.data() + first, count}, k);
    std::size_t out = sum.size(), dropped = cut.size();
    sum.resize(out + kept);
    cut.resize(dropped + count - kept);
    for (std::size_t i = first; i < last; ++i) {
      const bool stays = strongest.keeps(entries.values[i]);
      SparseVector& home = stays ? sum : cut;
      std::size_t& place = stays ? out : dropped;
      home.indices[place] = entries.indices[i];
      home.values[place++] = stays ? entries.values[i] : -entries.values[i];
    }
  }

  // Not kept across a wait:
  SparseVector received_, merged_;
  std::array<SparseVector, 2> meeting_;
  Adder adder_;
};

}  // namespace

std::unique_ptr<Exchange> make_gtopk(const Settings&, const Layout&) {
  return std::make_unique<GTopk>();
}

}  // namespace topreduce::exchange
