// Random k entries, the same on every rank: all draw from one counter-based stream, so only values
// travel and they can be added like dense ones.
//
//   the model, turned by a random offset and cut into k stretches:  |..x..|.x...|....x|x....|
//                                                 one entry of each, drawn by (seed, step, stretch)
//
// Exactly k entries, none twice, each with probability k/n; already in order; and a bucket draws
// its own entries without the others. Rounds: 2. Values sent per rank: 2 k (P-1)/P. Drops nothing.

#include <algorithm>

#include "topreduce/catalog.h"
#include "topreduce/exchange/all_reduce.h"
#include "topreduce/random.h"

namespace topreduce::exchange {
namespace {

class RandK final : public Exchange {
 public:
  Task run(const CompensatedGradient& compensated, const SparseVector&, const Budget& budget,
           Channel& channel, Result& result) override {
    // An interval of a segment meets at most two stretches more than its share; a turn makes two.
    const std::size_t most =
        compensated.size() * budget.entries / std::max<std::size_t>(1, budget.model) +
        4 * compensated.segments().size();
    result.sum.reserve(most);
    result.settled.reserve(most);
    Buffer<Index>& indices = result.sum.indices;
    indices.clear();
    for (const Segment& segment : compensated.segments()) draw(segment, budget, indices);
    if (channel.adder() != nullptr) {
      for (const Index index : indices) result.runs.push_back({index, 1});
      indices.clear();
      channel.reduce_there(result.runs.size(), result);
      co_return;
    }
    result.sum.resize(indices.size());
    compensated.gather(indices, result.sum.values);
    result.settled.assign(result.sum);
    co_await all_reduce(channel, compensated, indices, result.sum.values, result.settled.values);
  }

  Cost cost(double k, double, int ranks) const override {
    return {.rounds = 2, .values = 2 * k * (ranks - 1) / ranks, .indices = 0};
  }

 private:
  // Appends the drawn entries of one segment, ascending.
  static void draw(const Segment& segment, const Budget& budget, Buffer<Index>& indices) {
    if (segment.size() == 0) return;
    const std::uint64_t n = budget.model, k = budget.entries;
    const RandomStream stream(budget.seed, budget.step, RandomStream::Purpose::places);
    const std::uint64_t turn = stream.below(static_cast<std::uint32_t>(n), 0);
    // [begin, end) of the turned circle; the part past n starts again at 0.
    const auto draw_stretches = [&](std::uint64_t begin, std::uint64_t end, std::uint64_t shift) {
      for (std::uint64_t j = begin * k / n; j < k && j * n / k < end; ++j) {
        const std::uint64_t low = j * n / k, high = (j + 1) * n / k;
        const std::uint64_t place = low + stream.below(static_cast<std::uint32_t>(high - low),
                                                       static_cast<std::uint32_t>(j + 1));
        if (place >= begin && place < end) {
          indices.push_back(segment.start + static_cast<Index>(place - begin + shift));
        }
      }
    };
    const std::uint64_t begin = (segment.offset + turn) % n, size = segment.size();
    const std::uint64_t until_wrap = std::min(size, n - begin);
    draw_stretches(begin, begin + until_wrap, 0);
    if (until_wrap < size) draw_stretches(0, size - until_wrap, until_wrap);
  }
};

}  // namespace

std::unique_ptr<Exchange> make_randk(const Settings&, const Layout&) {
  return std::make_unique<RandK>();
}

}  // namespace topreduce::exchange
