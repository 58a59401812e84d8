#pragma once

#include <chrono>
#include <cstdint>
#include <mpi.h>
#include <string>
#include <vector>

#include "topreduce/api.h"
#include "topreduce/comm/communicator.h"

namespace topreduce::comm {

/// How bytes are handed to MPI; the same on every rank.
struct MpiLimits {
  std::size_t piece = std::size_t{1} << 30;  ///< longer parts travel in pieces; MPI counts with int
  int partners = 8;  ///< exchanged with at once; more would only crowd the network
  /// How long a wait keeps its core busy before it naps between looks.
  std::chrono::microseconds spin{100};
};

/// The ranks of an MPI communicator. Target topreduce::mpi.
///
/// Works on a duplicate, so its messages never meet the program's own, and MPI's errors on it
/// become CommError; after one, every further call throws CommError too. MPI itself knows no
/// time-out: a program that gives up must call MPI_Abort, which ends the job on every rank, instead
/// of leaving the others waiting.
class TOPREDUCE_API Mpi final : public Communicator {
 public:
  /// Collective over `comm`, between MPI_Init and MPI_Finalize; destroy it before the latter. If
  /// other threads than the main one will use it, MPI must run with MPI_THREAD_SERIALIZED.
  explicit Mpi(MPI_Comm comm = MPI_COMM_WORLD, MpiLimits limits = {});
  ~Mpi() override;
  Mpi(const Mpi&) = delete;
  Mpi& operator=(const Mpi&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }

 protected:
  void do_all_to_all(std::span<const std::byte> send, std::span<const std::size_t> counts,
                     Inbox& inbox) override;
  void do_all_gather(std::span<const std::byte> mine, Inbox& inbox) override;
  void do_barrier() override;

 private:
  struct Move {
    MPI_Request request;
    int partner;
  };
  /// Sends and receives that were started, turn after turn.
  struct Moves {
    std::vector<Move> started;
    std::vector<std::size_t> ends;  // ends[t]: of turn t in `started`; turns count from 1
  };

  template <class PartFor>
  void exchange(PartFor part_for, Inbox& inbox);  // part_for(rank): bytes that go there
  void send(std::span<const std::byte> bytes, int partner, int tag, Moves& moves);
  void receive(std::span<std::byte> bytes, int partner, int tag, Moves& moves);
  void wait(Moves& moves, int turn);
  void wait(MPI_Request& request, int partner);
  void check(int code, int partner);
  void fail(const std::string& what, int partner);

  MPI_Comm comm_ = MPI_COMM_NULL;
  MpiLimits limits_;
  int rank_ = 0, size_ = 1;
  const char* call_ = "";  // in progress, for its error
  bool broken_ = false;
  std::vector<std::uint64_t> lengths_out_, lengths_in_;  // bytes to and from each rank
  std::vector<std::size_t> starts_out_, starts_in_;      // where they start
  Moves lengths_, sends_, receives_;
};

}  // namespace topreduce::comm
