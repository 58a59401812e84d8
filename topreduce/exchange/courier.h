#pragma once

#include <span>

#include "topreduce/comm/communicator.h"
#include "topreduce/exchange/regions.h"
#include "topreduce/fingerprint.h"
#include "topreduce/pending.h"
#include "topreduce/stats.h"
#include "topreduce/wire/message.h"

namespace topreduce::exchange {

/// The communicator as an exchange sees it: messages instead of bytes, every message stamped and
/// checked, the vote carried along, the time of each part booked.
///
/// What a rank sends takes on, in its own memory too, what receivers read: values are rounded, and
/// entries that were rounded to zero may be gone.
class Courier {
 public:
  /// Starts a step.
  void begin(Communicator& comm, StepStats& stats, Threads& threads = Threads::none());
  /// Starts one exchange of it, over `pending`; from here on this rank votes `vote`.
  void open(const wire::Envelope& envelope, const Pending& pending, wire::Vote vote);

  /// The same over the envelope's universe, which is no model's: one piece.
  void open(const wire::Envelope& envelope, wire::Vote vote);

  int rank() const { return comm_->rank(); }
  int ranks() const { return comm_->size(); }
  /// Whether values change on their way, so that settled and sent must be told apart.
  bool rounds_values() const { return ranks() > 1 && envelope_.values != wire::Values::fp32; }
  /// Values that are rounded together: who splits them otherwise would round them otherwise.
  std::size_t values_per_scale() const { return wire::values_per_scale(envelope_.values); }

  /// One message to everyone. On return parts[r] is what rank r sent, `mine` among them.
  void all_gather(SparseVector& mine, std::vector<SparseVector>& parts);

  /// The same, where the entries of rank r lie in its regions.
  void all_gather(SparseVector& mine, std::span<const Regions::Piece> regions,
                  std::vector<SparseVector>& parts);

  /// The same for values that must arrive as they are, whatever the encoding.
  void all_gather_exact(SparseVector& mine, std::vector<SparseVector>& parts);

  /// outgoing[r], which lies in the regions of rank r, to rank r. On return incoming[r] is what
  /// rank r sent here, this rank's own part among them, unrounded.
  void all_to_all(std::span<SparseVector> outgoing, std::span<const Regions::Piece> regions,
                  std::vector<SparseVector>& incoming);

  /// As all_gather, for entries that crowd on few ranks: outgoing[r], which lies in the regions of
  /// this rank, goes to rank r, who hands it on to everyone as it came. On return `parts` holds
  /// what all ranks sent, in pieces that do not overlap.
  void all_gather_spread(std::span<SparseVector> outgoing, std::span<const Regions::Piece> regions,
                         std::vector<SparseVector>& parts);

  /// One message to rank `to` and one from rank `from`; all ranks call it together. kNobody: none.
  /// `received` is empty if nobody sends here.
  static constexpr int kNobody = -1;
  void pass(int to, SparseVector& mine, int from, SparseVector& received);

  /// Rounds `entries` and keeps them, as a message, for `pass_on`.
  void keep(SparseVector& entries);
  /// As `pass`, with the message that is kept; one that comes is kept in its place.
  void pass_on(int to, int from, SparseVector& received);

  /// Replaces `values`, which stand at `places` of `pending` on every rank (all of them if empty,
  /// so no index travels), with their sum over the ranks: each rank adds up a part of every
  /// parameter in rank order and hands it round. Two rounds, the volume of a ring. `settled`,
  /// unless empty, becomes what this rank settled by it: its rounded values and, in the part it
  /// owns, the rounding of the sum. Parts follow parameters, so who owes that does not depend on
  /// the bucket cut.
  void all_reduce(const Pending& pending, std::span<const Index> places, std::span<float> values,
                  std::span<float> settled);

  /// The same for values that have no places, in parts of even size. They take 16 bits at least:
  /// scales for many values would depend on the bucket cut.
  void all_reduce(std::span<float> values, std::span<float> settled);

  /// From here on, until the next `open`, messages are stamped with the fingerprint of a choice
  /// that all ranks must have made alike; a message with another one is a WireError that says
  /// `disagreement`.
  void expect_same(const Fingerprint& choice, const char* disagreement) {
    envelope_.contents = Fingerprint().add(envelope_.contents).add(choice.value()).value();
    envelope_.disagreement = disagreement;
  }

  /// Where an exchange books the time of its own computing.
  double& seconds(Stage stage) { return (*stats_)[stage]; }

  /// What the votes of every rank heard from so far, and of this one, come to.
  wire::Vote vote() const { return vote_; }
  /// Of messages so far, sent or heard; 0 if none told it.
  float loss_scale() const { return loss_scale_; }

 private:
  void hear(wire::Vote vote);
  void learn_loss_scale(float scale);
  void pack(wire::Pieces pieces, SparseVector& entries);  // appends to the outbox
  template <class Read>
  void read_all(Read&& read);  // read(rank, message) of every rank in the inbox, in rank order
  void send_to_each(std::span<const std::byte> bytes);  // counts_[r] of them to rank r
  void send_to_all();                                   // the outbox
  void receive_from(int from, SparseVector& received);
  template <class PiecesOf>
  void gather(SparseVector& mine, PiecesOf&& pieces_of, std::vector<SparseVector>& parts);
  void sort_by_owner(std::span<const Regions::Piece> regions);  // into owned_
  void reduce_parts(std::span<float> values, std::span<float> settled);
  void list_lengths(int r);  // of the pieces of rank r in cuts_, into lengths_
  template <class Visit>
  void for_each_piece(int r, Visit&& visit);  // visit(start, place in the part, length) in `values`

  Communicator* comm_ = nullptr;
  StepStats* stats_ = nullptr;
  Threads* threads_ = nullptr;
  wire::Envelope envelope_;
  wire::Vote vote_ = wire::Vote::yes;
  float loss_scale_ = 0;
  std::vector<wire::Piece> parameters_;          // of the open exchange
  std::vector<std::vector<wire::Piece>> owned_;  // by rank
  Bytes outbox_, kept_;
  SparseVector passing_;
  std::size_t spread_room_ = 0;
  std::vector<std::size_t> counts_;
  comm::Inbox inbox_;
  Buffer<std::size_t> cuts_;  // rank after rank, parameter after parameter: where pieces start
  Buffer<std::size_t> lengths_;
  Buffer<float> part_, sum_;  // a rank's pieces, one after the other
};

/// `exact` becomes what rounding changed: rounded - exact. Entries of `rounded` are among them; one
/// that is missing there was rounded to zero.
void take_from(const SparseVector& rounded, SparseVector& exact);

}  // namespace topreduce::exchange
