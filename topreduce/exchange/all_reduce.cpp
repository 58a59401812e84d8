#include "topreduce/exchange/all_reduce.h"

#include <algorithm>

#include "topreduce/kernels/kernels.h"

namespace topreduce::exchange {
namespace {

using Cuts = Buffer<std::size_t>;  // rank after rank, parameter after parameter: where pieces start

// Calls visit(start, place in the part, length) for every piece of rank r in the values.
template <class Visit>
void for_each_piece(const Cuts& cuts, int r, int ranks, Visit&& visit) {
  std::size_t place = 0;
  for (std::size_t i = comm::at(r); i + 1 < cuts.size(); i += comm::at(ranks)) {
    const std::size_t length = cuts[i + 1] - cuts[i];
    visit(cuts[i], place, length);
    place += length;
  }
}

// Loads the pieces of one rank, one after the other, and their lengths.
void collect_part(const Cuts& cuts, int r, int ranks, std::span<const float> from, auto& part) {
  make_room(part.values, from.size() / comm::at(ranks) + cuts.size());
  make_room(part.lengths, cuts.size());
  part.values.clear();
  part.lengths.clear();
  for_each_piece(cuts, r, ranks, [&](std::size_t start, std::size_t, std::size_t length) {
    const auto piece = from.subspan(start, length);
    part.values.insert(part.values.end(), piece.begin(), piece.end());
    part.lengths.push_back(length);
  });
  make_room(part.rounded, part.values.size());
  part.rounded.resize(part.values.size());
}

void scatter_part(const Cuts& cuts, int r, int ranks, std::span<const float> part,
                  std::span<float> target) {
  for_each_piece(cuts, r, ranks, [&](std::size_t start, std::size_t place, std::size_t length) {
    std::ranges::copy(part.subspan(place, length),
                      target.begin() + static_cast<std::ptrdiff_t>(start));
  });
}

Task reduce_parts(Channel& channel, const Cuts& cuts, std::span<float> values,
                  std::span<float> settled) {
  auto& part = channel.workspace().part;
  Buffer<float>& sum = part.sum;
  const int rank = channel.rank(), ranks = channel.ranks();
  if (ranks == 1 || channel.native()) {
    std::ranges::copy(values.first(settled.size()), settled.begin());
    if (ranks > 1) channel.reduce_natively(sum, values);
    co_return;
  }
  const Channel::Round split = channel.open_round();
  {
    Stopwatch watch(channel.seconds(Stage::pack));
    for (int turn = 0; turn < ranks; ++turn) {
      const int r = (rank + turn) % ranks;
      collect_part(cuts, r, ranks, values, part);
      channel.post_values(split, r == rank ? Channel::kNobody : r, part.lengths, part.values,
                          part.rounded);
      if (!settled.empty()) scatter_part(cuts, r, ranks, part.rounded, settled);
    }
  }
  co_await channel.arrival(split);
  {
    Stopwatch watch(channel.seconds(Stage::unpack));
    collect_part(cuts, rank, ranks, values, part);
    make_room(sum, part.values.size());
    sum.resize(part.values.size());
    for (int r = 0; r < ranks; ++r) {
      if (r == rank) {
        channel.post_values(split, Channel::kNobody, part.lengths, part.values, part.rounded);
      } else {
        channel.read_values(split, r, part.lengths, part.rounded);
      }
      if (r == 0) std::ranges::copy(part.rounded, sum.begin());
      if (r > 0) kernels::add(sum, part.rounded);
    }
    channel.close(split);
  }
  const Channel::Round gather = channel.open_round();
  {
    Stopwatch watch(channel.seconds(Stage::pack));
    channel.post_values_to_all(gather, part.lengths, sum, part.rounded);
    scatter_part(cuts, rank, ranks, part.rounded, values);
    // The owner rounds the sum for everyone, so the owner owes what that changed.
    if (!settled.empty()) {
      for_each_piece(cuts, rank, ranks,
                     [&](std::size_t start, std::size_t place, std::size_t length) {
                       for (std::size_t i = 0; i < length; ++i) {
                         settled[start + i] += part.rounded[place + i] - sum[place + i];
                       }
                     });
    }
  }
  co_await channel.arrival(gather);
  Stopwatch watch(channel.seconds(Stage::unpack));
  for (int r = 0; r < ranks; ++r) {
    if (r == rank) continue;
    collect_part(cuts, r, ranks, values, part);  // for its lengths
    channel.read_values(gather, r, part.lengths, part.rounded);
    scatter_part(cuts, r, ranks, part.rounded, values);
  }
  channel.close(gather);
}

// Where an exchange keeps its cuts, emptied.
Pool<Cuts>::Loan lend_cuts(Channel& channel) {
  auto cuts = channel.workspace().cuts.take(channel.number());
  cuts->clear();
  return cuts;
}

}  // namespace

Task all_reduce(Channel& channel, const CompensatedGradient& compensated,
                std::span<const Index> places, std::span<float> values, std::span<float> settled) {
  const auto parts = comm::at(channel.ranks());
  const auto cuts = lend_cuts(channel);
  make_room(*cuts, compensated.segments().size() * parts + 1);
  for (const Segment& segment : compensated.segments()) {
    for (std::size_t r = 0; r < parts; ++r) {
      const auto cut = static_cast<Index>(segment.start + segment.size() * r / parts);
      const auto found = std::ranges::lower_bound(places, cut) - places.begin();
      cuts->push_back(places.empty() ? std::min<std::size_t>(cut, values.size())
                                     : static_cast<std::size_t>(found));
    }
  }
  cuts->push_back(values.size());
  co_await reduce_parts(channel, *cuts, values, settled);
}

Task all_reduce(Channel& channel, wire::ValueFormat format, std::span<float> values,
                std::span<float> settled) {
  const auto parts = comm::at(channel.ranks());
  const auto cuts = lend_cuts(channel);
  for (std::size_t r = 0; r <= parts; ++r) cuts->push_back(values.size() * r / parts);
  const wire::ValueFormat given = channel.set_values(wire::without_scales(format));
  co_await reduce_parts(channel, *cuts, values, settled);
  channel.set_values(given);
}

}  // namespace topreduce::exchange
