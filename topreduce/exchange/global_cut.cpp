#include "topreduce/exchange/global_cut.h"

#include <array>
#include <bit>
#include <cmath>
#include <string>

#include "topreduce/exchange/all_reduce.h"

namespace topreduce::exchange {
namespace {

constexpr std::uint64_t kLowWord = 0xffffffff;
constexpr unsigned kBits = 8, kKeyBits = 64, kIndexBits = 32;
constexpr std::size_t kBins = 1 << kBits;

// A count travels as two floats, so that sums over 4096 ranks are exact.
constexpr std::uint64_t kLowCount = 1 << 12;

std::uint64_t count_at(std::span<const float> histogram, std::size_t bin) {
  return static_cast<std::uint64_t>(histogram[bin]) +
         kLowCount * static_cast<std::uint64_t>(histogram[kBins + bin]);
}

}  // namespace

GlobalCut::Key GlobalCut::key_of(Index index, float value) {
  return Key{std::bit_cast<std::uint32_t>(std::abs(value))} << kIndexBits | (kLowWord - index);
}

float GlobalCut::magnitude() const {
  return std::bit_cast<float>(static_cast<std::uint32_t>(cut_ >> kIndexBits));
}

Task GlobalCut::find(const SparseVector& mine, std::size_t k, Channel& channel) {
  cut_ = 0;
  Key prefix = 0;  // the bits of the k-th key that are known
  std::uint64_t wanted = k;
  for (unsigned shift = kKeyBits - kBits;; shift -= kBits) {
    const bool first = shift == kKeyBits - kBits;
    std::array<std::uint64_t, kBins> counts{};
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const Key key = key_of(mine.indices[i], mine.values[i]) >> shift;
      if (first || key >> kBits == prefix) ++counts[key % kBins];
    }
    histogram_.resize(2 * kBins);
    for (std::size_t bin = 0; bin < kBins; ++bin) {
      histogram_[bin] = static_cast<float>(counts[bin] % kLowCount);
      histogram_[kBins + bin] = static_cast<float>(counts[bin] / kLowCount);
    }
    co_await all_reduce(channel, wire::ValueFormat::fp32, histogram_, {});

    std::size_t bin = kBins - 1;
    for (; bin > 0 && count_at(histogram_, bin) < wanted; --bin) {
      wanted -= count_at(histogram_, bin);
    }
    if (count_at(histogram_, bin) < wanted) break;  // there are fewer than k: all are kept
    prefix = prefix << kBits | bin;
    const bool all_of_it = count_at(histogram_, bin) == wanted;
    if (shift == 0 || (shift <= kIndexBits && all_of_it)) {
      cut_ = prefix << shift;
      break;
    }
  }
  co_await share_counts(mine, channel);
}

Task GlobalCut::share_counts(const SparseVector& mine, Channel& channel) {
  std::uint64_t own = 0;
  for (std::size_t i = 0; i < mine.size(); ++i) {
    own += keeps(mine.indices[i], mine.values[i]) ? 1 : 0;
  }
  payload_.clear();
  comm::append_varint(payload_, own);
  const auto round = channel.send_payload_to_all(payload_);
  co_await channel.arrival(round);
  counts_.resize(comm::at(channel.ranks()));
  for (int r = 0; r < channel.ranks(); ++r) {
    std::uint64_t count = own;
    if (r != channel.rank()) {
      auto payload = channel.payload(round, r);
      if (!comm::read_varint(payload, count) || count > kLowWord) {
        throw WireError("counts: those of rank " + std::to_string(r) + " cannot be read");
      }
    }
    counts_[comm::at(r)] = static_cast<std::size_t>(count);
  }
  channel.close(round);
}

}  // namespace topreduce::exchange
