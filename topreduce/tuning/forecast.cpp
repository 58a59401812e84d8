// A step as a queue: buckets come while the backward pass goes on, one link carries them in turn.
//
//   gradients   |--1--|--2--|--3--|--4--|
//   link              |==1==|==2===|==3===|==4===|
//                                       '-- waited --'
//
// Constants were measured in the lab (docs/lab.md) and on the benchmarks of this repository.

#include "topreduce/tuning/forecast.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "topreduce/wire/payload.h"

namespace topreduce::tuning {
namespace {

constexpr double kForward = 1.0 / 3;  // of the computing
constexpr double kOfTheRate = 0.95;   // what TCP and its headers leave
constexpr double kHead = 60;          // bytes of a message beside its entries
constexpr double kRound = 4e-4;       // seconds for a round of messages, without any delay
constexpr double kEnd = 0.3e-9;       // seconds for each entry of the model, after the vote
constexpr double kSent = 6e-9;        // seconds to pack or unpack an entry
constexpr double kEntriesPerMb = (1 << 20) / sizeof(float);
constexpr double kFirstDdpBucketMb = 1, kDdpBucketMb = 25;

struct Load {
  double share;    // of the model that comes with it
  double seconds;  // on the link
};

// Seconds from the last gradient to the end of the last bucket.
double exposed(const std::vector<Load>& loads, double backward) {
  double come = 0, free = 0;
  for (const Load& load : loads) {
    come += load.share * backward;
    free = std::max(free, come) + load.seconds;
  }
  return std::max(0.0, free - backward);
}

Forecast complete(double bytes, double messages, double waited, const Site& site) {
  return {bytes, messages, waited, site.computed + waited};
}

}  // namespace

Forecast forecast(const Pipeline& pipeline, const Level& level, const Site& site) {
  const auto kept = static_cast<double>(pipeline.uncompressed.size());
  const double others =
      site.entries * kept / (static_cast<double>(pipeline.compressed.size()) + kept);
  const double n = site.entries - others;
  const double ranks = site.ranks;
  const bool everything = level.everything() || pipeline.choice == Choice::everything;
  const double whole = 2 * (ranks - 1) / ranks;  // times the entries
  exchange::Cost cost{.rounds = 2, .values = whole * n, .indices = 0};
  if (!everything) cost = pipeline.exchange->cost(level.density * n, n, site.ranks);
  const double bits =
      cost.values * wire::bits_per_value(everything ? level.values : pipeline.values) +
      cost.indices * wire::bits_per_index(level.density) +
      whole * others * wire::bits_per_value(pipeline.unremembered);
  const bool one = pipeline.granularity == Granularity::model;
  const double buckets =
      one ? 1
          : std::clamp(std::ceil((n + others) / static_cast<double>(pipeline.bucket_entries)), 1.0,
                       static_cast<double>(BucketPlan::kMost));
  const double messages =
      site.ranks == 1 ? 0 : buckets * static_cast<double>(cost.rounds) * (ranks - 1);
  const double bytes = bits / 8 + messages * kHead;
  const double link = bytes / (kOfTheRate * site.bytes_per_second) +
                      kSent * (cost.values + (everything ? 0 : level.density * n));
  const double backward = one ? 0 : (1 - kForward) * site.computed;
  const std::vector<Load> loads(static_cast<std::size_t>(buckets), {1 / buckets, link / buckets});
  const double rounds = site.ranks == 1 ? 0 : static_cast<double>(cost.rounds) + 1;  // and the vote
  const double waited =
      exposed(loads, backward) + rounds * (site.delay + kRound) + kEnd * (n + others);
  return complete(bytes, messages, waited, site);
}

Forecast forecast_ddp(double bits, const Site& site) {
  const double ranks = site.ranks, entries = site.entries;
  const double bytes = 2 * entries * (ranks - 1) / ranks * bits / 8;
  const double seconds = bytes / (kOfTheRate * site.bytes_per_second);
  std::vector<Load> loads;
  for (double left = entries; left > 0;) {
    const double cap = (loads.empty() ? kFirstDdpBucketMb : kDdpBucketMb) * kEntriesPerMb;
    const double size = std::min(left, cap);
    loads.push_back({size / entries, seconds * size / entries});
    left -= size;
  }
  const double rounds = 2 * (ranks - 1);  // of a ring, for each bucket
  const double latency = rounds * (site.delay + kRound);
  for (Load& load : loads) load.seconds += latency;
  const double waited = exposed(loads, (1 - kForward) * site.computed);
  return complete(bytes, rounds * static_cast<double>(loads.size()), waited, site);
}

Level advise(const Pipeline& pipeline, const Site& site) {
  const std::vector<Rung> ladder = pipeline.ladder(site.ranks);
  const double most = pipeline.search.most_bytes;
  const Forecast lowest = forecast(pipeline, ladder.front().level, site);
  const bool fits = lowest.waited <= pipeline.search.overhead * lowest.seconds;
  const auto will_do = [&](const Forecast& step) {
    if (fits) return step.waited <= pipeline.search.overhead * step.seconds;
    const bool more = lowest.bytes < kClearlyFewer * step.bytes;
    return more && lowest.waited > kHardlyShorter * step.waited;
  };
  const Level* best = &ladder.front().level;
  for (const Rung& rung : ladder) {
    const Forecast step = forecast(pipeline, rung.level, site);
    if (most > 0 && step.bytes > most) continue;
    if (will_do(step)) best = &rung.level;
  }
  return *best;
}

}  // namespace topreduce::tuning
