// Words of 24 bits, which a float holds exactly:
//
//   word 0    flags: something to say, joined, divide by those present
//   word 1    unused parameters 0 to 23, one bit each
//   word 2    unused parameters 24 to 47 ...

#include "topreduce/roll_call.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace topreduce {
namespace {

constexpr std::size_t kBits = 24;
constexpr std::uint32_t kAll = (1u << kBits) - 1;
constexpr std::uint32_t kAsks = 1, kJoined = 2, kDivideByPresent = 4;

std::size_t word_of(std::size_t parameter) {
  return 1 + parameter / kBits;
}

std::uint32_t bit_of(std::size_t parameter) {
  return 1u << parameter % kBits;
}

// A peer's word may be anything.
std::uint32_t read_word(float value, int rank) {
  const bool whole = value >= 0 && value <= static_cast<float>(kAll) &&
                     value == static_cast<float>(static_cast<std::uint32_t>(value));
  if (!whole) {
    throw WireError("attendance: a word of rank " + std::to_string(rank) + " is no whole number");
  }
  return static_cast<std::uint32_t>(value);
}

}  // namespace

void RollCall::begin(std::size_t parameters, int ranks) {
  parameters_ = parameters;
  divisor_ = ranks;
  all_used_ = true;
  said_.assign(1 + (parameters + kBits - 1) / kBits, 0);
  mine_.clear();
}

void RollCall::note(const Attendance& attendance) {
  const bool joined = attendance.presence == Attendance::Presence::joined;
  const bool asks = joined || !attendance.unused.empty();
  if (joined) std::fill(said_.begin() + 1, said_.end(), kAll);
  said_[0] |= (asks ? kAsks : 0) | (joined ? kJoined : 0) |
              (attendance.divisor == Attendance::Divisor::present ? kDivideByPresent : 0);
  for (const std::size_t id : attendance.unused) said_[word_of(id)] |= bit_of(id);

  mine_.clear();
  for (std::size_t i = 0; i < said_.size(); ++i) {
    if (said_[i] != 0) mine_.push_back(static_cast<Index>(i), static_cast<float>(said_[i]));
  }
}

bool RollCall::asks() const {
  return !mine_.empty() && mine_.indices[0] == 0 &&
         (static_cast<std::uint32_t>(mine_.values[0]) & kAsks) != 0;
}

void RollCall::hold(const wire::Envelope& envelope, exchange::Courier& courier) {
  const auto ranks = static_cast<std::size_t>(courier.ranks());
  words_.assign(1 + (parameters_ + kBits - 1) / kBits, kAll);
  wire::Envelope roll = envelope;
  roll.universe = static_cast<Index>(words_.size());
  roll.values = wire::Values::fp32;
  courier.open(roll, wire::Vote::ask);
  courier.all_gather(mine_, parts_);

  int present = 0, by_present = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    std::uint32_t flags = 0;
    std::size_t next = 0;  // words that did not travel are 0
    for (std::size_t i = 0; i < words_.size(); ++i) {
      const bool here = next < parts_[r].size() && parts_[r].indices[next] == i;
      const std::uint32_t word =
          here ? read_word(parts_[r].values[next++], static_cast<int>(r)) : 0;
      if (i == 0) flags = word;
      words_[i] &= word;
    }
    present += (flags & kJoined) == 0 ? 1 : 0;
    by_present += (flags & kDivideByPresent) != 0 ? 1 : 0;
  }
  if (by_present != 0 && by_present != courier.ranks()) {
    throw std::invalid_argument(
        "the ranks differ in what sums are divided by: " + std::to_string(by_present) + " of " +
        std::to_string(courier.ranks()) + " want the number of ranks that are present");
  }
  divisor_ = by_present != 0 ? std::max(1, present) : courier.ranks();
  all_used_ = std::all_of(words_.begin() + 1, words_.end(), [](auto word) { return word == 0; });
}

bool RollCall::used(std::size_t parameter) const {
  return all_used_ || (words_[word_of(parameter)] & bit_of(parameter)) == 0;
}

}  // namespace topreduce
