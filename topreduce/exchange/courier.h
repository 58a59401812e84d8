#pragma once

#include <span>

#include "topreduce/comm/communicator.h"
#include "topreduce/pending.h"
#include "topreduce/stats.h"
#include "topreduce/wire/message.h"

namespace topreduce::exchange {

/// The communicator as an exchange sees it: messages instead of bytes, every message stamped and
/// checked, the vote carried along, the time of each part booked.
class Courier {
 public:
  /// Starts a step.
  void begin(Communicator& comm, StepStats& stats);
  /// Starts one exchange of it; from here on this rank votes `vote`.
  void open(const wire::Envelope& envelope, wire::Vote vote);

  int rank() const { return comm_->rank(); }
  int ranks() const { return comm_->size(); }
  /// Whether values change on their way, so that settled and sent must be told apart.
  bool rounds_values() const { return ranks() > 1 && envelope_.values != wire::Values::fp32; }

  /// One message to everyone. `mine` takes on the values that receivers read. On return parts[r]
  /// is what rank r sent, `mine` among them.
  void all_gather(SparseVector& mine, std::vector<SparseVector>& parts);

  /// outgoing[r] to rank r; takes on the values that receivers read. On return incoming[r] is what
  /// rank r sent here, this rank's own part among them.
  void all_to_all(std::span<SparseVector> outgoing, std::vector<SparseVector>& incoming);

  /// One message to rank `to` and one from rank `from`; all ranks call it together. kNobody: none.
  /// `received` is empty if nobody sends here.
  static constexpr int kNobody = -1;
  void pass(int to, SparseVector& mine, int from, SparseVector& received);

  /// Replaces `values`, which stand at `places` of `pending` on every rank (all of them if empty,
  /// so no index travels), with their sum over the ranks: each rank adds up a part of every
  /// parameter in rank order and hands it round. Two rounds, the volume of a ring. `settled`,
  /// unless empty, becomes what this rank settled by it: its rounded values and, in the part it
  /// owns, the rounding of the sum. Parts follow parameters, so who owes that does not depend on
  /// the bucket cut.
  void all_reduce(const Pending& pending, std::span<const Index> places, std::span<float> values,
                  std::span<float> settled);

  /// The same for values that have no places, in parts of even size.
  void all_reduce(std::span<float> values, std::span<float> settled);

  /// As all_gather, where rank r sends some of sizes[r] values that are numbered from 0. Where that
  /// takes fewer bytes they travel whole, without indices; zeros do not arrive.
  void all_gather_regions(SparseVector& mine, std::span<const std::size_t> sizes,
                          std::vector<SparseVector>& parts);

  /// Replaces values with what receivers would read.
  void round(std::span<float> values);

  /// From here on, until the next `open`, messages are stamped with the fingerprint of a choice
  /// that all ranks must have made alike; a message with another one is a WireError.
  void expect_same(std::uint32_t choice) { envelope_.run ^= choice; }

  /// Where an exchange books the time of its own computing.
  double& seconds(Stage stage) { return (*stats_)[stage]; }

  /// What the votes of every rank heard from so far, and of this one, come to.
  wire::Vote vote() const { return vote_; }

 private:
  void hear(wire::Vote vote);
  template <class Read>
  void read_all(Read&& read);  // read(rank, message) of every rank in the inbox, in rank order
  void send_to_each();         // counts_[r] bytes of the outbox to rank r
  void reduce_parts(std::span<float> values, std::span<float> settled);
  template <class Visit>
  void for_each_piece(int r, Visit&& visit);  // visit(start, place in the part, length) in `values`

  Communicator* comm_ = nullptr;
  StepStats* stats_ = nullptr;
  wire::Envelope envelope_;
  wire::Vote vote_ = wire::Vote::yes;
  Bytes outbox_;
  std::vector<std::size_t> counts_;
  comm::Inbox inbox_;
  Buffer<std::size_t> cuts_;  // rank after rank, parameter after parameter: where pieces start
  Buffer<float> part_, sum_;  // a rank's pieces, one after the other
};

}  // namespace topreduce::exchange
