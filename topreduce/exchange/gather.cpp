// Everyone's entries to everyone, then each rank adds them up in rank order (TopkA).
//
//   rank 0: a      a b c      a+b+c
//   rank 1: b  ->  a b c  ->  a+b+c
//   rank 2: c      a b c      a+b+c
//
// Rounds: 1. Entries sent per rank: k (P-1). Drops nothing. Best for few ranks or very sparse
// input: what arrives grows with the number of ranks.

#include "topreduce/catalog.h"

namespace topreduce::exchange {
namespace {

class Gather final : public Exchange {
 public:
  Task run(const CompensatedGradient& compensated, const SparseVector& selected, const Budget&,
           Channel& channel, Result& result) override {
    const auto round = channel.send_to_all(channel.parameters(), selected, result.settled);
    co_await channel.arrival(round);
    Parts& parts = channel.workspace().incoming;
    channel.read_from_all(round, result.settled, parts);
    channel.workspace().adder.add(parts, compensated.size(), result.sum);
  }

  Cost cost(double k, double, int ranks) const override {
    return {.rounds = 1, .values = k * (ranks - 1), .indices = k * (ranks - 1)};
  }
};

}  // namespace

std::unique_ptr<Exchange> make_gather(const Settings&, const Layout&) {
  return std::make_unique<Gather>();
}

}  // namespace topreduce::exchange
