#include "topreduce/wire/rice.h"

#include <algorithm>
#include <array>
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

namespace {

/// Bits one after the other. Up to 8 bytes behind the last one are written too.
class BitWriter {
 public:
  explicit BitWriter(std::byte* start = nullptr) : start_(start), out_(start) {}

  /// The lowest `count` of `bits`, at most kAtOnce; all others are zero.
  void put(std::uint64_t bits, unsigned count) {
    pending_ |= bits << filled_;
    filled_ += count;
    store(out_, pending_);
    out_ += filled_ / 8;
    pending_ >>= filled_ & ~7u;
    filled_ %= 8;
  }
  void put_zeros(std::uint64_t count) {
    for (; count > kAtOnce; count -= kAtOnce) put(0, kAtOnce);
    put(0, static_cast<unsigned>(count));
  }
  /// All that `other` wrote, further on in memory.
  void append(const BitWriter& other) {
    const std::byte* from = other.start_;
    auto left = 8 * static_cast<std::uint64_t>(other.out_ - from) + other.filled_;
    for (; left > 0; from += kAtOnce / 8) {
      const auto count = static_cast<unsigned>(std::min<std::uint64_t>(left, kAtOnce));
      put(load<std::uint64_t>(from) & ((std::uint64_t{1} << count) - 1), count);
      left -= count;
    }
  }
  /// The end of all bytes, the last one filled with zeros.
  std::byte* end() const { return filled_ > 0 ? out_ + 1 : out_; }

 private:
  std::byte* start_;
  std::byte* out_;
  std::uint64_t pending_ = 0;  // bits not yet written ...
  unsigned filled_ = 0;        // ... and how many, fewer than 8 between puts
};

std::uint64_t bits_with(std::span<const Index> gaps, unsigned parameter) {
  std::uint64_t bits = gaps.size() * (parameter + 1);
  for (const Index gap : gaps) bits += gap >> parameter;
  return bits;
}

// Near the logarithm of 0.69 times the mean gap; the neighbours are tried too.
unsigned best_parameter(std::span<const Index> gaps) {
  std::uint64_t sum = 0;
  for (const Index gap : gaps) sum += gap;
  const std::uint64_t scaled = sum * 11 / (16 * gaps.size());
  const unsigned guess = scaled == 0 ? 0 : static_cast<unsigned>(std::bit_width(scaled)) - 1;
  unsigned best = guess > 0 ? guess - 1 : 0;
  std::uint64_t least = bits_with(gaps, best);
  for (unsigned parameter = best + 1; parameter <= std::min(guess + 1, 31u); ++parameter) {
    const std::uint64_t bits = bits_with(gaps, parameter);
    if (bits < least) {
      least = bits;
      best = parameter;
    }
  }
  return best;
}

void write_block(std::span<const Index> gaps, BitWriter& writer) {
  const unsigned parameter = best_parameter(gaps);
  const Index mask = (Index{1} << parameter) - 1;
  writer.put(parameter, kParameterBits);
  for (const Index gap : gaps) {
    const Index zeros = gap >> parameter;
    const std::uint64_t code = std::uint64_t{gap & mask} << 1 | 1;
    if (zeros + parameter < kAtOnce) {
      writer.put(code << zeros, zeros + parameter + 1);
    } else {
      writer.put_zeros(zeros);
      writer.put(code, parameter + 1);
    }
  }
}

void write_blocks(std::span<const Index> gaps, BitWriter& writer) {
  for (std::size_t start = 0; start < gaps.size(); start += kBlock) {
    write_block(gaps.subspan(start, std::min(kBlock, gaps.size() - start)), writer);
  }
}

}  // namespace

// Stretches are written far enough apart and then pushed together. No gap takes more than 34 bits
// of its 5 bytes, so none runs into the next, nor over what is still to be read.
std::byte* write_rice(std::span<const Index> gaps, Threads& threads, std::byte* out) {
  const Stretches stretches(gaps.size(), 1, kBlock);
  BitWriter all(out);
  if (threads.count() == 1 || stretches.count() < 2) {
    write_blocks(gaps, all);
    return all.end();
  }
  std::array<BitWriter, Stretches::kMost> writers;
  threads.for_each(stretches.count(), [&](std::size_t s) {
    const std::size_t begin = stretches.begin(s);
    writers[s] = BitWriter(out + 5 * begin);
    write_blocks(gaps.subspan(begin, stretches.length(s)), writers[s]);
  });
  all = writers[0];
  for (std::size_t s = 1; s < stretches.count(); ++s) all.append(writers[s]);
  return all.end();
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
