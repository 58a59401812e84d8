// Everything, from everyone: the baseline, and the first steps of every method.
//
//   rank 0: a0 a1 a2      each rank adds up one part       S0 S1 S2
//   rank 1: b0 b1 b2  ->  S0 | S1 | S2, in rank order  ->  S0 S1 S2
//   rank 2: c0 c1 c2                                       S0 S1 S2
//
// Rounds: 2 (all-to-all, all-gather). Values sent per rank: 2 n (P-1)/P, as a ring. Drops nothing.

#include "topreduce/catalog.h"
#include "topreduce/exchange/all_reduce.h"

namespace topreduce::exchange {
namespace {

class Dense final : public Exchange {
 public:
  Task run(const CompensatedGradient& compensated, const SparseVector&, const Budget&,
           Channel& channel, Result& result) override {
    result.extent = Result::Extent::whole;
    if (channel.adder() != nullptr) {
      channel.reduce_there(compensated.size(), result);
      co_return;
    }
    result.dense_sum.resize(compensated.size());
    result.dense_settled.resize(channel.rounds_values() ? compensated.size() : 0);
    compensated.evaluate(result.dense_sum);
    co_await all_reduce(channel, compensated, {}, result.dense_sum, result.dense_settled);
  }

  Cost cost(double, double size, int ranks) const override {
    return {.rounds = 2, .values = 2 * size * (ranks - 1) / ranks, .indices = 0};
  }
};

}  // namespace

std::unique_ptr<Exchange> make_dense(const Settings&, const Layout&) {
  return std::make_unique<Dense>();
}

}  // namespace topreduce::exchange
