#include "topreduce/exchange/global_cut.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

namespace topreduce::exchange {
namespace {

constexpr std::uint64_t kLowWord = 0xffffffff;

}  // namespace

GlobalCut::Key GlobalCut::key_of(Index index, float value) {
  return Key{std::bit_cast<std::uint32_t>(std::abs(value))} << 32 | (kLowWord - index);
}

float GlobalCut::magnitude() const {
  return std::bit_cast<float>(static_cast<std::uint32_t>(cut_ >> 32));
}

std::size_t GlobalCut::count_from(Key least, const SparseVector& entries) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    count += key_of(entries.indices[i], entries.values[i]) >= least ? 1 : 0;
  }
  return count;
}

// All ranks' keys of a round into parts_ and, strongest first, into shown_.
Task GlobalCut::show(std::span<const Key> keys, Channel& channel) {
  make_room(order_, keys.size());
  order_.assign(keys.begin(), keys.end());
  std::ranges::sort(order_, std::greater<>(), [](Key key) { return key & kLowWord; });
  message_.resize(keys.size());
  for (std::size_t i = 0; i < order_.size(); ++i) {
    message_.indices[i] = static_cast<Index>(kLowWord - (order_[i] & kLowWord));
    message_.values[i] = std::bit_cast<float>(static_cast<std::uint32_t>(order_[i] >> 32));
  }
  const wire::Values given = channel.set_values(wire::Values::fp32);
  const auto round = channel.send_to_all(channel.parameters(), message_, rounded_);
  co_await channel.arrival(round);
  channel.read_from_all(round, rounded_, parts_);
  channel.set_values(given);
  std::size_t total = 0;
  for (const SparseVector& part : parts_) total += part.size();
  make_room(shown_, total);
  shown_.clear();
  for (const SparseVector& part : parts_) {
    for (std::size_t i = 0; i < part.size(); ++i) {
      shown_.push_back(key_of(part.indices[i], part.values[i]));
    }
  }
  std::ranges::sort(shown_, std::greater<>());
}

Task GlobalCut::find(const SparseVector& mine, std::size_t k, Channel& channel) {
  const auto ranks = static_cast<std::size_t>(channel.ranks());
  const auto stride = static_cast<std::size_t>(
      std::max(1.0, std::floor(std::sqrt(static_cast<double>(k) / static_cast<double>(ranks)))));
  // What is shown varies much from time to time, but is little.
  const std::size_t room = 4 * (k / stride + ranks * stride);
  parts_.resize(ranks);
  for (SparseVector& part : parts_) part.reserve(room);
  message_.reserve(room);
  order_.reserve(room);
  shown_.reserve(room);
  make_room(mine_, mine.size());
  mine_.clear();
  for (std::size_t i = 0; i < mine.size(); ++i) {
    mine_.push_back(key_of(mine.indices[i], mine.values[i]));
  }
  std::ranges::sort(mine_, std::greater<>());
  mine_.resize(std::min(mine_.size(), k));

  make_room(sample_, mine_.size() / stride);
  sample_.clear();
  for (std::size_t i = stride; i <= mine_.size(); i += stride) sample_.push_back(mine_[i - 1]);
  co_await show(sample_, channel);

  // Entries from the c-th sample up: at least c strides, at most (stride - 1) more on each rank.
  const std::size_t unseen = ranks * (stride - 1);
  const std::size_t sure = std::min(k > unseen ? (k - unseen) / stride : 0, shown_.size());
  const std::size_t enough = (k + stride - 1) / stride;
  const Key high = sure > 0 ? shown_[sure - 1] : ~Key{0};
  const Key low = enough > 0 && enough <= shown_.size() ? shown_[enough - 1] : 0;
  counts_.clear();
  for (const SparseVector& part : parts_) counts_.push_back(count_from(high, part) * stride);

  const std::size_t first = counts_[static_cast<std::size_t>(channel.rank())];
  const auto end = std::ranges::find_if(mine_, [low](Key key) { return key < low; });
  const auto last = std::max(first, static_cast<std::size_t>(end - mine_.begin()));
  co_await show(std::span(mine_).subspan(first, last - first), channel);

  const std::size_t missing = k - sure * stride;
  cut_ = high;
  if (missing > 0) cut_ = missing <= shown_.size() ? std::min(high, shown_[missing - 1]) : 0;
  for (std::size_t r = 0; r < parts_.size(); ++r) counts_[r] += count_from(cut_, parts_[r]);
}

}  // namespace topreduce::exchange
