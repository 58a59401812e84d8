#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "topreduce/api.h"
#include "topreduce/errors.h"
#include "topreduce/storage.h"

namespace topreduce::comm {

/// What passed through a communicator since it was made. A rank's own part does not travel.
struct Traffic {
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t rounds = 0;  ///< collectives that every rank had to wait for
};

/// Bytes from every rank, in rank order, in one buffer that is reused from call to call.
struct TOPREDUCE_API Inbox {
  Bytes bytes;
  std::vector<std::size_t> counts;  ///< bytes from each rank

  std::span<const std::byte> from(int rank) const;
};

/// Moves bytes between ranks; knows nothing of gradients. Calls are collective and in the same
/// order on every rank. A failed call throws CommError on every rank that can still be reached.
class TOPREDUCE_API Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Sends the first counts[0] bytes of `send` to rank 0, the next counts[1] to rank 1, and so on.
  /// Parts may be empty and of different lengths.
  void all_to_all(std::span<const std::byte> send, std::span<const std::size_t> counts,
                  Inbox& inbox);

  /// Sends `mine` to every rank; lengths may differ.
  void all_gather(std::span<const std::byte> mine, Inbox& inbox);

  /// Replaces `bytes` (same length everywhere) with those of `root`.
  void broadcast(std::span<std::byte> bytes, int root);

  /// Replaces `values` (same length everywhere) with their sum over the ranks, added in rank order:
  /// the same bits on every rank and in every run.
  void all_reduce(std::span<float> values);

  /// Returns once every rank has called it.
  void barrier();

  const Traffic& traffic() const { return traffic_; }

 protected:
  // What a transport implements. The base class checks arguments, counts, and short-cuts one rank.
  virtual void do_all_to_all(std::span<const std::byte> send, std::span<const std::size_t> counts,
                             Inbox& inbox) = 0;
  virtual void do_all_gather(std::span<const std::byte> mine, Inbox& inbox) = 0;
  virtual void do_broadcast(std::span<std::byte> bytes, int root);  ///< default: an all_gather
  virtual void do_barrier();                                        ///< default: an all_gather

 private:
  Traffic traffic_;
  Inbox scratch_;
  std::vector<std::size_t> counts_;  // all_reduce: bytes of each rank's part
};

}  // namespace topreduce::comm

namespace topreduce {
using comm::Communicator;
}
