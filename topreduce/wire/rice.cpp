#include "topreduce/wire/rice.h"

#include <algorithm>
#include <array>
#include <bit>
#include <string>

#include "topreduce/errors.h"
#include "topreduce/wire/gap_block.h"
#include "topreduce/wire/little_endian.h"

namespace topreduce::wire {
namespace {

constexpr unsigned kParameterBits = 5;

// Near the logarithm of 0.69 times the mean gap; this one and the next two are tried.
unsigned least_parameter(std::uint64_t sum, std::size_t count) {
  const std::uint64_t scaled = sum * 11 / (16 * count);
  const auto width = static_cast<unsigned>(std::bit_width(scaled));
  return width > 1 ? width - 2 : 0;
}

// As best_parameter, for any number of gaps.
unsigned best_of_few(std::span<const Index> gaps, unsigned guess) {
  unsigned best = guess;
  std::uint64_t least = ~std::uint64_t{0};
  for (unsigned parameter = guess; parameter <= std::min(guess + 2, 31u); ++parameter) {
    std::uint64_t bits = gaps.size() * parameter;
    for (const Index gap : gaps) bits += gap >> parameter;
    if (bits < least) {
      least = bits;
      best = parameter;
    }
  }
  return best;
}

}  // namespace

// ---- writing -----------------------------------------------------------------------------------

void RiceWriter::put_bits(std::uint64_t bits, unsigned count) {
  pending_ |= bits << filled_;
  filled_ += count;
  if (filled_ < 64) return;
  store(front_, pending_);
  front_ += 8;
  filled_ -= 64;
  pending_ = filled_ > 0 ? bits >> (count - filled_) : 0;
}

void RiceWriter::put_quotients(std::span<const Index> gaps, unsigned parameter) {
  std::uint64_t pending = pending_, filled = filled_;
  std::byte* out = front_;
  const auto flush = [&] {
    store(out, pending);
    out += 8;
    pending = 0;
    filled -= 64;
  };
  for (const Index gap : gaps) {
    filled += gap >> parameter;
    while (filled >= 64) flush();
    pending |= std::uint64_t{1} << filled;
    ++filled;
  }
  if (filled == 64) flush();
  pending_ = pending;
  filled_ = filled;
  front_ = out;
}

void RiceWriter::put(std::span<const Index> gaps, std::uint64_t sum) {
  const unsigned guess = least_parameter(sum, gaps.size());
  if (gaps.size() == kBlockGaps) {
    const unsigned parameter = best_parameter(gaps.data(), guess);
    put_bits(parameter, kParameterBits);
    put_quotients(gaps, parameter);
    back_ -= low_bytes(parameter);
    pack_lows(gaps.data(), parameter, back_);
  } else {
    const unsigned parameter = best_of_few(gaps, guess);
    put_bits(parameter, kParameterBits);
    put_quotients(gaps, parameter);
    const Index mask = (Index{1} << parameter) - 1;
    for (const Index gap : gaps) put_bits(gap & mask, parameter);
  }
}

std::byte* RiceWriter::finish() {
  for (; filled_ > 0; filled_ -= std::min<std::uint64_t>(filled_, 8)) {
    *front_++ = static_cast<std::byte>(pending_);
    pending_ >>= 8;
  }
  return front_;
}

// ---- reading -----------------------------------------------------------------------------------

namespace {

[[noreturn]] void refuse_end() {
  throw WireError("message: the indices are cut off, expected more bytes");
}

/// The indices so far.
class RiceReader {
 public:
  RiceReader(std::span<const std::byte> bytes, std::uint64_t places)
      : bytes_(bytes), places_(places) {}

  void read_full_block(Index* indices) {
    const unsigned parameter = read_parameter();
    if (parameter > kMostParameter) {
      throw WireError("message: parameter of a full block is " + std::to_string(parameter) +
                      ", expected at most " + std::to_string(kMostParameter));
    }
    if (bytes_.size() < low_bytes(parameter)) refuse_end();
    bytes_ = bytes_.first(bytes_.size() - low_bytes(parameter));
    const std::byte* const lows = bytes_.data() + bytes_.size();
    const std::uint64_t quotients = read_quotients(kBlockGaps);
    const std::uint32_t sum =
        join_gaps(ones_.data(), lows, parameter, static_cast<Index>(following_), indices);
    following_ += (quotients << parameter) + sum + kBlockGaps;
    check_places();
  }

  void read_last_block(std::span<Index> indices) {
    const unsigned parameter = read_parameter();
    if (read_quotients(indices.size()) > places_ >> parameter) {
      throw WireError("message: a gap of more than the expected " + std::to_string(places_) +
                      " places");
    }
    if (bit_ + parameter * indices.size() > 8 * bytes_.size()) refuse_end();
    const std::uint64_t mask = (std::uint64_t{1} << parameter) - 1;
    std::uint32_t before = 0;  // the place behind the last one
    for (std::size_t j = 0; j < indices.size(); ++j) {
      const std::uint32_t quotient = ones_[j] - before;
      before = ones_[j] + 1;
      const std::uint64_t low = load_up_to(bytes_, bit_ / 8) >> bit_ % 8 & mask;
      bit_ += parameter;
      following_ += std::uint64_t{quotient} << parameter | low;
      indices[j] = static_cast<Index>(following_++);
    }
    check_places();
  }

  RiceBytes bytes_read(std::size_t all) const { return {(bit_ + 7) / 8, all - bytes_.size()}; }

 private:
  unsigned read_parameter() {
    const std::uint64_t bits = load_up_to(bytes_, bit_ / 8) >> bit_ % 8;
    bit_ += kParameterBits;
    return bits & ((1u << kParameterBits) - 1);
  }

  /// Returns the sum of `count` quotients; their ones are in ones_.
  std::uint64_t read_quotients(std::size_t count) {
    const std::uint64_t end = find_ones(bytes_, bit_, count, ones_.data());
    if (end == kNoOnes) refuse_end();
    const std::uint64_t quotients = end - bit_ - count;
    bit_ = end;
    return quotients;
  }

  // Indices ascend, so the last of a block is the largest; 64 bits cannot wrap round.
  void check_places() const {
    if (following_ <= places_) return;
    throw WireError("message: index " + std::to_string(following_ - 1) + ", expected less than " +
                    std::to_string(places_));
  }

  std::span<const std::byte> bytes_;  // up to the low bits that were read
  std::uint64_t places_;
  std::uint64_t bit_ = 0;
  std::uint64_t following_ = 0;
  std::array<std::uint32_t, kBlockGaps + kOnesSlack> ones_;
};

}  // namespace

RiceBytes read_rice(std::span<const std::byte> bytes, std::uint64_t places,
                    std::span<Index> indices) {
  RiceReader reader(bytes, places);
  while (indices.size() >= kBlockGaps) {
    reader.read_full_block(indices.data());
    indices = indices.subspan(kBlockGaps);
  }
  if (!indices.empty()) reader.read_last_block(indices);
  return reader.bytes_read(bytes.size());
}

}  // namespace topreduce::wire
