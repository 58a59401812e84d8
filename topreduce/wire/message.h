#pragma once

#include <cstdint>
#include <span>

#include "topreduce/wire/payload.h"

namespace topreduce::wire {

/// What every message of one exchange says of itself, checked on receipt.
struct Envelope {
  std::uint32_t run = 0;  ///< fingerprint of version, model, method and parameters
  std::uint64_t step = 0;
  std::uint32_t bucket = 0;  ///< number of the exchange within the step
  Index universe = 0;        ///< entries that the exchange spans
  Values values = Values::fp32;
  std::uint32_t contents = 0;  ///< fingerprint of the parameters, and of what ranks chose together
  float loss_scale = 0;        ///< where all ranks must have the same; 0: it is not known
  /// What it means if a message has other contents.
  const char* disagreement =
      "the ranks hand over different parameters; all must add the same buckets in the same order";
};

/// A rank's say in the vote; it rides in every message. One no makes it no; else one ask, which
/// says yes but wants all ranks to hear it out before they commit, makes it ask.
enum class Vote : std::uint8_t { no = 0, yes = 1, ask = 2 };

/// Appends one message with `entries`, which must lie in `pieces`, to `out`. Afterwards they are
/// what receivers read: values are rounded, and in a piece that travels whole because that is
/// smaller, zeros are left out. Returns the vote it carries: `vote`, or no if a value is not finite
/// and the format cannot say so.
Vote pack(const Envelope& envelope, Pieces pieces, Vote vote, SparseVector& entries, Bytes& out);

/// The same for values at places that both sides know, lengths[i] of them in piece i; no index
/// travels, and every value arrives.
Vote pack_stretch(const Envelope& envelope, std::span<const std::size_t> lengths, Vote vote,
                  std::span<float> values, Bytes& out);

/// Reads a message of `pack`; returns the sender's vote. Any bytes at all give entries that lie in
/// `pieces` and ascend, or a WireError that says what is wrong; nothing larger than the universe
/// allows is allocated.
Vote unpack(const Envelope& expected, Pieces pieces, std::span<const std::byte> message,
            SparseVector& entries);

/// Reads a message of `pack_stretch` with the same lengths, exactly values.size() in all.
Vote unpack_stretch(const Envelope& expected, std::span<const std::size_t> lengths,
                    std::span<const std::byte> message, std::span<float> values);

/// The loss scale in the header of a message, 0 if its sender does not know it.
float loss_scale_of(std::span<const std::byte> message);

/// The first of several messages that stand one after the other. Throws WireError if it is cut off.
std::span<const std::byte> first_message(std::span<const std::byte> messages);

/// The most bytes that a message of `count` entries takes.
std::size_t largest_message(std::size_t count, std::size_t pieces);

}  // namespace topreduce::wire
