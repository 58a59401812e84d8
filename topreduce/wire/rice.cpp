#include "topreduce/wire/rice.h"

#include <algorithm>
#include <bit>
#include <string>

#include "topreduce/errors.h"
#include "topreduce/wire/little_endian.h"

namespace topreduce::wire {
namespace {

constexpr std::size_t kBlock = 256;
constexpr unsigned kParameterBits = 5;
constexpr unsigned kAtOnce = 56;  // bits that are sure to fit beside an unfinished byte

// The bits from a place on; zeros past the end.
class BitReader {
 public:
  explicit BitReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  /// At least kAtOnce of the next bits.
  std::uint64_t peek() const {
    const std::size_t at = place_ / 8;
    if (at + 8 <= bytes_.size()) return load<std::uint64_t>(bytes_.data() + at) >> place_ % 8;
    std::uint64_t bits = 0;
    for (std::size_t i = at; i < bytes_.size(); ++i) {
      bits |= static_cast<std::uint64_t>(bytes_[i]) << 8 * (i - at);
    }
    return bits >> place_ % 8;
  }
  void skip(std::size_t count) { place_ += count; }
  bool past_end() const { return place_ > 8 * bytes_.size(); }
  std::size_t bytes_read() const { return (place_ + 7) / 8; }

 private:
  std::span<const std::byte> bytes_;
  std::size_t place_ = 0;
};

[[noreturn]] void refuse_end() {
  throw WireError("message: the indices are cut off, expected more bytes");
}

// A gap that does not fit into one look.
std::uint64_t read_long(BitReader& reader, unsigned parameter, std::uint64_t places) {
  std::uint64_t zeros = 0;
  while ((reader.peek() & ((std::uint64_t{1} << kAtOnce) - 1)) == 0) {
    zeros += kAtOnce;
    reader.skip(kAtOnce);
    if (reader.past_end()) refuse_end();
  }
  const auto rest = static_cast<unsigned>(std::countr_zero(reader.peek()));
  reader.skip(rest + 1);
  zeros += rest;
  if (zeros > places >> parameter) {
    throw WireError("message: a gap of more than the expected " + std::to_string(places) +
                    " places");
  }
  const std::uint64_t low = reader.peek() & ((std::uint64_t{1} << parameter) - 1);
  reader.skip(parameter);
  return zeros << parameter | low;
}

}  // namespace

// ---- writing -----------------------------------------------------------------------------------

void RiceWriter::put(std::uint64_t bits, unsigned count) {
  pending_ |= bits << filled_;
  filled_ += count;
  store(out_, pending_);
  out_ += filled_ / 8;
  pending_ >>= filled_ & ~7u;
  filled_ %= 8;
}

void RiceWriter::put_zeros(std::uint64_t count) {
  for (; count > kAtOnce; count -= kAtOnce) put(0, kAtOnce);
  put(0, static_cast<unsigned>(count));
}

std::uint64_t RiceWriter::bits_with(unsigned parameter) const {
  std::uint64_t bits = count_ * (parameter + 1);
  for (std::size_t i = 0; i < count_; ++i) bits += gaps_[i] >> parameter;
  return bits;
}

// Near the logarithm of 0.69 times the mean gap; the neighbours are tried too.
unsigned RiceWriter::best_parameter() const {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < count_; ++i) sum += gaps_[i];
  const std::uint64_t scaled = sum * 11 / (16 * count_);
  const unsigned guess = scaled == 0 ? 0 : static_cast<unsigned>(std::bit_width(scaled)) - 1;
  unsigned best = guess > 0 ? guess - 1 : 0;
  std::uint64_t least = bits_with(best);
  for (unsigned parameter = best + 1; parameter <= std::min(guess + 1, 31u); ++parameter) {
    const std::uint64_t bits = bits_with(parameter);
    if (bits < least) {
      least = bits;
      best = parameter;
    }
  }
  return best;
}

void RiceWriter::write_block() {
  const unsigned parameter = best_parameter();
  const Index mask = (Index{1} << parameter) - 1;
  put(parameter, kParameterBits);
  for (std::size_t i = 0; i < count_; ++i) {
    const Index zeros = gaps_[i] >> parameter;
    const std::uint64_t code = std::uint64_t{gaps_[i] & mask} << 1 | 1;
    if (zeros + parameter < kAtOnce) {
      put(code << zeros, zeros + parameter + 1);
    } else {
      put_zeros(zeros);
      put(code, parameter + 1);
    }
  }
  count_ = 0;
}

std::byte* RiceWriter::finish() {
  if (count_ > 0) write_block();
  return filled_ > 0 ? out_ + 1 : out_;  // its bits are already there
}

// ---- reading -----------------------------------------------------------------------------------

std::size_t read_rice(std::span<const std::byte> bytes, std::uint64_t places,
                      std::span<Index> indices) {
  BitReader reader(bytes);
  std::uint64_t following = 0;
  for (std::size_t start = 0; start < indices.size(); start += kBlock) {
    const auto block = indices.subspan(start, std::min(kBlock, indices.size() - start));
    const auto parameter = static_cast<unsigned>(reader.peek() & ((1u << kParameterBits) - 1));
    const std::uint64_t mask = (std::uint64_t{1} << parameter) - 1;
    reader.skip(kParameterBits);
    for (Index& index : block) {
      const std::uint64_t bits = reader.peek();
      const auto zeros = static_cast<unsigned>(std::countr_zero(bits));
      if (zeros + parameter < kAtOnce) {
        following += std::uint64_t{zeros} << parameter | (bits >> (zeros + 1) & mask);
        reader.skip(zeros + parameter + 1);
      } else {
        following += read_long(reader, parameter, places);
      }
      index = static_cast<Index>(following++);
    }
    // Indices ascend, so the last of a block is the largest; 64 bits cannot wrap round.
    if (reader.past_end()) refuse_end();
    if (following > places) {
      throw WireError("message: index " + std::to_string(following - 1) + " before number " +
                      std::to_string(start + block.size()) + ", expected less than " +
                      std::to_string(places));
    }
  }
  return reader.bytes_read();
}

}  // namespace topreduce::wire
