#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "topreduce/errors.h"
#include "topreduce/sparse_vector.h"
#include "topreduce/threads.h"

namespace topreduce::wire {

/// How a value travels. `pack` rounds to it, so that what a rank settles is what its peers read.
enum class Values : std::uint8_t { fp32, bf16, fp16, int8, int4, int2, sign };
inline constexpr std::array<std::string_view, 7> kValuesNames = {"fp32", "bf16", "fp16", "int8",
                                                                 "int4", "int2", "sign"};

/// Values that share a scale, in this encoding; 1 if each stands for itself.
std::size_t values_per_scale(Values encoding);
/// The encoding for values that no parameter places or nobody remembers the rounding of: 16 bits at
/// least, each value for itself.
Values without_scales(Values encoding);
/// Bits that a value takes in a long message.
double bits_per_value(Values encoding);
/// Bits that an index takes in a long message, if a share `density` of all places is sent.
double bits_per_index(double density);

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

/// Where the entries of a message may lie: pieces of the exchange, ascending, known to both sides.
/// A piece lies within one parameter, and nothing that decides how its values are rounded reaches
/// over its bounds: so results do not depend on how parameters are put together into buckets.
struct Piece {
  Index begin, end;
};
using Pieces = std::span<const Piece>;

/// Appends one message with `entries`, which must lie in `pieces`, to `out`. Afterwards they are
/// what receivers read: values are rounded, and in a piece that travels whole because that is
/// smaller, zeros are left out. Returns the vote it carries: `vote`, or no if a value is not finite
/// and the encoding cannot say so. `threads` share the work; the bytes do not depend on them.
Vote pack(const Envelope& envelope, Pieces pieces, Vote vote, SparseVector& entries, Bytes& out,
          Threads& threads = Threads::none());

/// The same for values at places that both sides know, lengths[i] of them in piece i; no index
/// travels, and every value arrives.
Vote pack_stretch(const Envelope& envelope, std::span<const std::size_t> lengths, Vote vote,
                  std::span<float> values, Bytes& out, Threads& threads = Threads::none());

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
