#pragma once

#include <array>
#include <coroutine>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "topreduce/comm/communicator.h"
#include "topreduce/compensated_gradient.h"
#include "topreduce/exchange/coroutine_pool.h"
#include "topreduce/exchange/regions.h"
#include "topreduce/exchange/result.h"
#include "topreduce/fingerprint.h"
#include "topreduce/pool.h"
#include "topreduce/stats.h"
#include "topreduce/wire/payload.h"
#include "topreduce/wire/seal.h"

namespace topreduce::exchange {

using Parts = std::vector<SparseVector>;  ///< one for each rank

/// Memory that the exchanges of a step share, one after the other or side by side; what is lent
/// belongs to the exchange of that number.
struct Workspace {
  Pool<SparseVector> vectors;
  Pool<Parts> parts;
  Pool<RegionMap> regions;
  Pool<Buffer<std::size_t>> cuts;
  Pool<Bytes> payloads;
  // Not for keeping across a wait:
  Bytes payload;
  Parts incoming;
  Adder adder;
  struct {
    Buffer<float> values, rounded, sum;
    Buffer<std::size_t> lengths;
  } part;  ///< of one rank in an all-reduce
};

/// What an exchange is about.
struct Subject {
  std::uint32_t exchange = 0;  ///< its number, the same on all ranks: that of its first parameter
  std::uint64_t run = 0, step = 0;
  std::uint64_t parameters = 0;  ///< fingerprint of the parameters it spans
  wire::ValueFormat values = wire::ValueFormat::fp32;
  bool native = false;  ///< sums by the transport's own all-reduce
};

/// The messages of one exchange, every one stamped and checked. Messages go in rounds: all ranks
/// count them alike, and an exchange waits for a round by `co_await channel.arrival(round)`. What
/// is sent is not changed; `rounded` becomes what receivers read.
class Channel {
 public:
  /// Starts an exchange over the segments of `compensated`.
  void open(Communicator& comm, const Subject& subject, const CompensatedGradient& compensated,
            StepStats& stats, Workspace& workspace);

  int rank() const { return comm_->rank(); }
  int ranks() const { return comm_->size(); }
  wire::ValueFormat values() const { return values_; }
  /// Whether values change on their way, so that settled and sent must be told apart.
  bool rounds_values() const { return ranks() > 1 && values_ != wire::ValueFormat::fp32; }
  /// Values that are rounded together: who splits them otherwise would round them otherwise.
  std::size_t values_per_scale() const { return wire::values_per_scale(values_); }
  /// The parameters, as pieces of the exchange.
  wire::Pieces parameters() const { return parameters_; }
  Workspace& workspace() { return *workspace_; }
  std::uint32_t number() const { return subject_.exchange; }  ///< of the exchange
  CoroutinePool& coroutine_pool() { return coroutine_pool_; }

  /// From here on messages are stamped with the fingerprint of a choice that all ranks must have
  /// made alike; a message with another one is a WireError that says `disagreement`.
  void expect_same(const Fingerprint& choice, const char* disagreement);

  /// Where an exchange books the time of its own computing.
  double& seconds(Stage stage) { return (*stats_)[stage]; }

  // ---- rounds ----

  struct Round {
    comm::Tag tag;
    std::size_t messages;  ///< that come here
  };
  static constexpr int kNobody = -1;

  /// Waits until all messages of a round are here.
  auto arrival(const Round& round) { return Arrival{*this, round}; }
  /// Whether the exchange can go on.
  bool ready() const { return waiting_ && is_here(awaited_); }
  /// Lets it go on; `threads` share what there is to read.
  void resume(Threads& threads) {
    threads_ = &threads;
    std::exchange(waiting_, {}).resume();
  }

  // ---- the transport's own all-reduce ----

  bool native() const { return subject_.native; }
  /// Adds up over the ranks. What the messages of other exchanges carry in their seals goes along
  /// as further numbers; WireError on all ranks if they differ.
  void reduce_natively(Buffer<float>& scratch, std::span<float> values);
  /// The device where that is done; null: in main memory.
  Device* adder() const { return adder_; }
  /// The same for what the device has noted of `entries` values, which comes to `sums` ...
  void reduce_noted(std::size_t entries, std::span<float> sums);
  /// ... and for `count` entries of x at the runs, or everywhere, whose sums stay on the device.
  void reduce_there(std::size_t count, Result& result);
  /// Both, where the device itself takes rows by the sums of `noted` values (Device::add_up_best).
  void reduce_best(std::size_t noted, std::span<const Device::Ranked> parts,
                   std::span<const Index> picks, Result& result);

  // ---- entries ----

  /// One message to everyone, with entries that lie in `pieces`.
  Round send_to_all(wire::Pieces pieces, const SparseVector& mine, SparseVector& rounded);
  /// Replaces parts[r] with what rank r sent, of entries that lie in pieces_of(r); of this rank
  /// that is `own`.
  template <class PiecesOf>
  void read_from_all(const Round& round, const PiecesOf& pieces_of, const SparseVector& own,
                     Parts& parts) {
    parts.resize(comm::at(ranks()));
    read_each(round, [&](int r, std::span<const std::byte> message) {
      decode_from(r, pieces_of(r), message, parts[comm::at(r)]);
    });
    parts[comm::at(rank())].assign(own);
  }
  void read_from_all(const Round& round, const SparseVector& own, Parts& parts) {
    read_from_all(
        round, [&](int) { return parameters(); }, own, parts);
  }

  /// outgoing[r], which lies in the regions of rank r, to rank r. What stays here is not rounded.
  Round send_to_each(std::span<const SparseVector> outgoing, const RegionMap& regions,
                     Parts& rounded);
  void read_from_each(const Round& round, const RegionMap& regions, const SparseVector& own,
                      Parts& parts);

  /// As send_to_all, for entries that crowd on few ranks: outgoing[r], which lies in the regions of
  /// this rank, goes to rank r, who carries it on to everyone as it came. `parts` become what all
  /// ranks sent; `own`: what this rank sent, as all read it.
  Round send_to_carriers(std::span<const SparseVector> outgoing, const RegionMap& regions,
                         Parts& rounded);
  Round carry_to_all(const Round& came);
  void read_carried(const Round& round, const RegionMap& regions, const SparseVector& own,
                    Parts& parts);

  /// One message to rank `to`, and one from rank `from`; kNobody: none.
  Round send(int to, const SparseVector& mine, SparseVector& rounded, int from);
  void read(const Round& round, int from, SparseVector& entries);
  /// The same with bytes: a payload as `encode` makes it or `payload` shows it, handed on as it is.
  Round send_payload(int to, std::span<const std::byte> payload, int from);
  Round send_payload_to_all(std::span<const std::byte> payload);
  std::span<const std::byte> payload(const Round& round, int from) const;
  void encode(wire::Pieces pieces, const SparseVector& entries, SparseVector& rounded, Bytes& out);

  // ---- values at places that all ranks know ----

  void post_values(const Round& round, int to, std::span<const std::size_t> lengths,
                   std::span<const float> values, std::span<float> rounded);
  void post_values_to_all(const Round& round, std::span<const std::size_t> lengths,
                          std::span<const float> values, std::span<float> rounded);
  void read_values(const Round& round, int from, std::span<const std::size_t> lengths,
                   std::span<float> values);
  /// A round in which every rank sends to every other.
  Round open_round();
  /// The next round has this number: for those that not all ranks take part in.
  void number_next_round(std::uint32_t number) { rounds_ = number; }
  /// Values of this format from here on; returns the one before.
  wire::ValueFormat set_values(wire::ValueFormat values) { return std::exchange(values_, values); }

  /// The messages of a round are read: their memory is free.
  void close(const Round& round) { comm_->release(round.tag); }

  /// False if something could not be said in the format of the values: it is not finite.
  bool finite() const { return finite_; }

 private:
  struct Arrival {
    bool await_ready() const { return channel.is_here(round); }
    void await_suspend(std::coroutine_handle<> exchange) const {
      channel.awaited_ = round;
      channel.waiting_ = exchange;
    }
    void await_resume() const {}
    Channel& channel;
    Round round;
  };

  bool is_here(const Round& round) const { return comm_->arrived(round.tag) >= round.messages; }
  Round next_round(std::size_t messages);
  void carry(int sender, std::span<const std::byte> payload);
  wire::Identity identity() const;
  void post(const Round& round, int to, std::span<const std::byte> payload);
  void post_to_all(const Round& round, std::span<const std::byte> payload);
  void decode_from(int from, wire::Pieces pieces, std::span<const std::byte> payload,
                   SparseVector& entries) const;
  // Calls read(r, payload) for every other rank, on several threads.
  template <class Read>
  void read_each(const Round& round, Read&& read);
  std::string title() const;  // how errors call this exchange
  [[noreturn]] void refuse(int from, const char* what) const;
  void add_up_natively(std::span<float> values);
  // What goes along: four numbers and their squares.
  using Stamp = std::array<float, 8>;
  Stamp stamp_of(std::size_t values) const;
  void announce_native(std::size_t values);
  void expect_stamp(const Stamp& stamp, std::span<const float> sums) const;

  Communicator* comm_ = nullptr;
  Device* adder_ = nullptr;
  StepStats* stats_ = nullptr;
  Threads* threads_ = &Threads::none();
  Workspace* workspace_ = nullptr;
  Subject subject_;
  wire::ValueFormat values_ = wire::ValueFormat::fp32;
  std::uint64_t contents_ = 0;
  const char* disagreement_ = nullptr;
  std::vector<wire::Piece> parameters_;
  std::uint32_t rounds_ = 0;
  bool chosen_ = false;  // the ranks chose something together
  Bytes carried_;        // what this rank carries for others
  bool finite_ = true;
  std::coroutine_handle<> waiting_;
  Round awaited_{};
  CoroutinePool coroutine_pool_;
};

template <class Read>
void Channel::read_each(const Round& round, Read&& read) {
  Stopwatch watch(seconds(Stage::unpack));
  threads_->for_each(comm::at(ranks()), [&](std::size_t r) {
    const int from = static_cast<int>(r);
    if (from != rank()) read(from, payload(round, from));
  });
  close(round);
}

/// `exact` becomes what rounding changed of it: rounded - exact. Entries of `rounded` are among
/// them; one that is missing there was rounded to zero.
void to_rounding_error(const SparseVector& rounded, SparseVector& exact);

}  // namespace topreduce::exchange
