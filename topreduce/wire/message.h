#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "topreduce/errors.h"
#include "topreduce/sparse_vector.h"

namespace topreduce::wire {

/// How a value travels. `round` and the packed bytes agree: what a rank settles is what its peers
/// read.
enum class Values : std::uint8_t { fp32, bf16, fp16 };

/// What every message of one exchange says of itself, checked on receipt.
struct Envelope {
  std::uint32_t run = 0;  ///< fingerprint of version, model, method and parameters
  std::uint64_t step = 0;
  std::uint32_t bucket = 0;  ///< number of the exchange within the step
  Index universe = 0;        ///< entries that the exchange spans
  Values values = Values::fp32;
};

/// A rank's say in the vote; it rides in every message. One no makes it no; else one ask, which
/// says yes but wants all ranks to hear it out before they commit, makes it ask.
enum class Vote : std::uint8_t { no = 0, yes = 1, ask = 2 };

/// Appends one message with `entries` to `out`. Rounds entries.values to what receivers will read.
void pack(const Envelope& envelope, Vote vote, SparseVector& entries, Bytes& out);

/// The same for all values of [0, values.size()) of a stretch known to both sides; no index
/// travels.
void pack_stretch(const Envelope& envelope, Vote vote, std::span<float> values, Bytes& out);

/// Reads a message of `pack`; returns the sender's vote. Any bytes at all give entries that are in
/// range and ascending, or a WireError that says what is wrong; nothing larger than the universe
/// allows is allocated.
Vote unpack(const Envelope& expected, std::span<const std::byte> message, SparseVector& entries);

/// Reads a message of `pack_stretch` of exactly values.size() values.
Vote unpack_stretch(const Envelope& expected, std::span<const std::byte> message,
                    std::span<float> values);

/// Whether a message says that it is one of `pack_stretch`; reading it checks.
bool is_stretch(std::span<const std::byte> message);

/// The bytes that a message of a stretch of `count` values takes.
std::size_t stretch_message(std::size_t count, Values values);

/// The most bytes that a message of `count` entries takes.
std::size_t largest_message(std::size_t count, Values values);

}  // namespace topreduce::wire
