#include "topreduce/vote.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

#include "topreduce/fingerprint.h"
#include "topreduce/wire/little_endian.h"
#include "topreduce/wire/seal.h"

namespace topreduce {
namespace {

using comm::kVote;

constexpr int kRadix = 8;
constexpr std::size_t kOutcomeHead = 16;  // bytes

constexpr std::uint32_t kNotFinite = 1, kAsks = 2;    // in a word
constexpr std::byte kJoined{1}, kDivideByPresent{2};  // in a participation

using tuning::Measurement;

// Numbers of a measurement, in the order in which they travel, as fp32.
constexpr double Measurement::*kMeasured[] = {&Measurement::computed,   &Measurement::waited,
                                              &Measurement::exchanging, &Measurement::overlap,
                                              &Measurement::bytes,      &Measurement::busy};

// What travels; merged with others it says what all of them say.
struct Word {
  std::uint32_t flags = 0;
  float least_scale = std::numeric_limits<float>::infinity();
  float largest_scale = 0;
  std::uint32_t least_alike = 0, largest_alike = 0;

  std::optional<Measurement> measured;

  static constexpr std::size_t kBytes = 20, kMeasuredBytes = 4 * std::size(kMeasured);

  void merge(const Word& other) {
    flags |= other.flags;
    least_scale = std::min(least_scale, other.least_scale);
    largest_scale = std::max(largest_scale, other.largest_scale);
    least_alike = std::min(least_alike, other.least_alike);
    largest_alike = std::max(largest_alike, other.largest_alike);
    if (measured) measured->merge(*other.measured);
  }
  using Packed = std::array<std::byte, kBytes + kMeasuredBytes>;
  std::span<const std::byte> pack(Packed& bytes) const {
    wire::store(bytes.data(), flags);
    wire::store(bytes.data() + 4, std::bit_cast<std::uint32_t>(least_scale));
    wire::store(bytes.data() + 8, std::bit_cast<std::uint32_t>(largest_scale));
    wire::store(bytes.data() + 12, least_alike);
    wire::store(bytes.data() + 16, largest_alike);
    if (!measured) return std::span(bytes).first(kBytes);
    std::byte* place = bytes.data() + kBytes;
    for (const auto member : kMeasured) {
      wire::store(place, std::bit_cast<std::uint32_t>(static_cast<float>(*measured.*member)));
      place += 4;
    }
    return bytes;
  }
  // Like `mine`: with what was measured, or without.
  static Word unpack(std::span<const std::byte> bytes, const Word& mine) {
    Word word;
    if (bytes.size() != kBytes + (mine.measured ? kMeasuredBytes : 0)) {
      throw WireError("vote: " + std::to_string(bytes.size()) + " bytes");
    }
    word.flags = wire::load<std::uint32_t>(bytes.data());
    word.least_scale = std::bit_cast<float>(wire::load<std::uint32_t>(bytes.data() + 4));
    word.largest_scale = std::bit_cast<float>(wire::load<std::uint32_t>(bytes.data() + 8));
    word.least_alike = wire::load<std::uint32_t>(bytes.data() + 12);
    word.largest_alike = wire::load<std::uint32_t>(bytes.data() + 16);
    if (!(word.least_scale > 0) || !(word.largest_scale >= 0)) {
      throw WireError("vote: a loss scale is not a positive number");
    }
    if (mine.measured) {
      const std::byte* place = bytes.data() + kBytes;
      word.measured.emplace();
      for (const auto member : kMeasured) {
        const float value = std::bit_cast<float>(wire::load<std::uint32_t>(place));
        if (!(value >= 0) || !std::isfinite(value)) {
          throw WireError("vote: what was measured is not a positive number");
        }
        *word.measured.*member = value;
        place += 4;
      }
    }
    return word;
  }
};

// All ranks must merge the same numbers.
Measurement as_it_travels(Measurement measured) {
  for (const auto member : kMeasured) {
    double& value = measured.*member;
    value = static_cast<float>(std::clamp(value, 0.0, Measurement::kUnknown));
  }
  return measured;
}

std::size_t byte_of(std::size_t parameter) {
  return parameter / 8;
}

std::byte bit_of(std::size_t parameter) {
  return std::byte{1} << parameter % 8;
}

// Reads what rank `from` said; errors name it.
template <class Read>
void checked(std::uint64_t step, const Communicator& comm, int from, Read&& read) {
  try {
    read();
  } catch (const WireError& error) {
    throw WireError("rank " + std::to_string(comm.rank()) + ", step " + std::to_string(step) +
                    ", the vote of rank " + std::to_string(from) + ": " + error.what());
  }
}

}  // namespace

void StepVote::begin(std::size_t parameters, int ranks) {
  parameters_ = parameters;
  divisor_ = ranks;
  all_used_ = finite_ = true;
  asks_ = false;
  loss_scale_ = 0;
  measured_.reset();
  mine_.assign(1 + (parameters + 7) / 8, std::byte{0});
}

void StepVote::note(const Participation& participation) {
  const bool joined = participation.presence == Participation::Presence::joined;
  asks_ = asks_ || joined || !participation.unused.empty();
  if (joined) std::fill(mine_.begin() + 1, mine_.end(), std::byte{0xff});
  mine_[0] |=
      (joined ? kJoined : std::byte{0}) |
      (participation.divisor == Participation::Divisor::present ? kDivideByPresent : std::byte{0});
  for (const std::size_t id : participation.unused) mine_[1 + byte_of(id)] |= bit_of(id);
}

// Each rank hears in every round of seven others, all of whom have heard of as many as it has:
// after three rounds of 512 ranks.
std::uint64_t StepVote::hold(const Ballot& ballot, Communicator& comm) {
  Word word;
  word.flags = (ballot.finite ? 0 : kNotFinite) | (asks_ ? kAsks : 0);
  if (ballot.loss_scale > 0) word.least_scale = word.largest_scale = ballot.loss_scale;
  word.least_alike = word.largest_alike = ballot.alike;
  if (ballot.measured) word.measured = as_it_travels(*ballot.measured);
  Word::Packed packed;
  const wire::Identity identity{
      .origin = Fingerprint().add(ballot.run).add(ballot.step).add(kVote).long_value()};
  const int rank = comm.rank(), ranks = comm.size();
  std::uint32_t rounds = 0;
  for (int stride = 1; stride<ranks; stride = stride> ranks / kRadix ? ranks : stride * kRadix) {
    const comm::Tag tag{kVote, rounds++};
    const auto bytes = word.pack(packed);
    const wire::Seal seal = wire::seal(identity, tag.round, bytes);
    std::size_t messages = 0;
    for (int j = 1; j < kRadix && j * stride < ranks; ++j, ++messages) {
      comm.expect(tag, (rank + ranks - j * stride) % ranks);
      comm.post((rank + j * stride) % ranks, tag, seal, bytes);
    }
    comm.wait(tag, messages);
    for (int j = 1; j < kRadix && j * stride < ranks; ++j) {
      const int from = (rank + ranks - j * stride) % ranks;
      checked(ballot.step, comm, from, [&] {
        word.merge(Word::unpack(wire::open(identity, tag.round, comm.message(tag, from)), word));
      });
    }
    comm.release(tag);
  }
  if (ballot.one_scale && word.least_scale < word.largest_scale) {
    std::ostringstream text;
    text << "rank " << rank << ", step " << ballot.step << ": loss scales from " << word.least_scale
         << " to " << word.largest_scale << ": give all ranks the same scaler";
    throw WireError(text.str());
  }
  alike_ = word.least_alike == word.largest_alike;
  finite_ = (word.flags & kNotFinite) == 0;
  loss_scale_ = word.largest_scale;
  measured_ = word.measured;
  if ((word.flags & kAsks) != 0) {
    hold_participation(identity, rounds++, ballot.step, comm);
  }
  return rounds;
}

void StepVote::hold_participation(const wire::Identity& identity, std::uint32_t round,
                                  std::uint64_t step, Communicator& comm) {
  const comm::Tag tag{kVote, round};
  const wire::Seal seal = wire::seal(identity, round, mine_);
  for (int peer = 0; peer < comm.size(); ++peer) {
    if (peer == comm.rank()) continue;
    comm.expect(tag, peer);
    comm.post(peer, tag, seal, mine_);
  }
  comm.wait(tag, comm::at(comm.size() - 1));
  unused_.assign(mine_.size() - 1, std::byte{0xff});
  int present = 0, by_present = 0;
  for (int r = 0; r < comm.size(); ++r) {
    std::span<const std::byte> theirs = mine_;
    if (r != comm.rank()) {
      checked(step, comm, r, [&] {
        theirs = wire::open(identity, round, comm.message(tag, r));
        if (theirs.size() == mine_.size()) return;
        throw WireError("participation: " + std::to_string(theirs.size()) + " bytes, expected " +
                        std::to_string(mine_.size()));
      });
    }
    for (std::size_t i = 0; i < unused_.size(); ++i) unused_[i] &= theirs[1 + i];
    present += (theirs[0] & kJoined) == std::byte{0} ? 1 : 0;
    by_present += (theirs[0] & kDivideByPresent) != std::byte{0} ? 1 : 0;
  }
  comm.release(tag);
  if (by_present != 0 && by_present != comm.size()) {
    throw std::invalid_argument(
        "the ranks differ in what sums are divided by: " + std::to_string(by_present) + " of " +
        std::to_string(comm.size()) + " want the number of ranks that are present");
  }
  divisor_ = by_present != 0 ? std::max(1, present) : comm.size();
  all_used_ = true;
  for (std::size_t id = 0; id < parameters_; ++id) {
    all_used_ = all_used_ && (unused_[byte_of(id)] & bit_of(id)) == std::byte{0};
  }
}

std::size_t StepVote::Outcome::bytes_for(std::size_t parameters) {
  return kOutcomeHead + byte_of(parameters + 7);
}

void StepVote::Outcome::store(std::span<std::byte> bytes) const {
  wire::store(bytes.data(), step);
  wire::store(bytes.data() + 8, static_cast<std::uint32_t>(divisor));
  wire::store(bytes.data() + 12, std::bit_cast<std::uint32_t>(loss_scale));
  const auto bits = bytes.subspan(kOutcomeHead);
  std::ranges::fill(bits, std::byte{0});
  std::ranges::copy(unused, bits.begin());
}

void StepVote::Outcome::load(std::span<const std::byte> bytes) {
  step = wire::load<std::uint64_t>(bytes.data());
  divisor = static_cast<int>(wire::load<std::uint32_t>(bytes.data() + 8));
  loss_scale = std::bit_cast<float>(wire::load<std::uint32_t>(bytes.data() + 12));
  const auto bits = bytes.subspan(kOutcomeHead);
  unused.assign(bits.begin(), bits.end());
  if (divisor < 1 || !(loss_scale >= 0) || !std::isfinite(loss_scale)) {
    throw WireError("rebuild: the outcome of a vote is impossible");
  }
}

void StepVote::tell(Outcome& outcome, std::uint64_t step, float loss_scale) const {
  outcome.step = step;
  outcome.divisor = divisor_;
  outcome.loss_scale = loss_scale;
  outcome.unused.clear();
  if (!all_used_) outcome.unused.assign(unused_.begin(), unused_.end());
}

void StepVote::adopt(const Outcome& outcome) {
  finite_ = true;
  divisor_ = outcome.divisor;
  unused_.assign(outcome.unused.begin(), outcome.unused.end());
  all_used_ = std::ranges::all_of(unused_, [](std::byte bits) { return bits == std::byte{0}; });
}

bool StepVote::used(std::size_t parameter) const {
  return all_used_ || (unused_[byte_of(parameter)] & bit_of(parameter)) == std::byte{0};
}

}  // namespace topreduce
