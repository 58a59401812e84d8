#pragma once

#include <chrono>
#include <cstddef>
#include <mpi.h>
#include <string>
#include <vector>

#include "topreduce/api.h"
#include "topreduce/comm/communicator.h"

namespace topreduce::comm {

/// How bytes are handed to MPI; the same on every rank.
struct MpiLimits {
  /// Longer frames travel in pieces of so many bytes, 19 at least; MPI counts with int.
  std::size_t piece = std::size_t{1} << 30;
  /// How long a wait keeps its core busy before it naps between looks.
  std::chrono::microseconds spin{100};
  /// How long to wait for a rank from which nothing comes; see Communicator::set_timeout.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// The ranks of an MPI communicator. Target topreduce::mpi.
///
/// Works on a duplicate, so its messages never meet the program's own, and MPI's errors on it
/// become CommError; after one, every further call throws CommError too. A rank that destroys it
/// tells the others: those that still wait for it get CommError. So do those that wait for one that
/// has died or stopped, once the time-out is over. MPI itself knows none: a program that got a
/// CommError must end with MPI_Abort, since MPI_Finalize would wait for that rank for ever.
class TOPREDUCE_API Mpi final : public Communicator {
 public:
  /// Collective over `comm`, between MPI_Init and MPI_Finalize; destroy it before the latter. If
  /// other threads than the main one will use it, MPI must run with MPI_THREAD_SERIALIZED.
  explicit Mpi(MPI_Comm comm = MPI_COMM_WORLD, MpiLimits limits = {});
  /// Waits until all ranks do the same, but not for long.
  ~Mpi() override;
  Mpi(const Mpi&) = delete;
  Mpi& operator=(const Mpi&) = delete;

  void drain() override;
  void set_timeout(std::chrono::milliseconds timeout) override;
  bool has_native_all_reduce() const override { return true; }

 protected:
  void send_frame(int peer, std::span<const std::byte> frame) override;
  void hand_over(int peer, Bytes& frame) override;
  bool receive_frames() override;
  void do_native_all_reduce(std::span<float> values) override;
  std::size_t frame_limit() const override { return limits_.piece; }
  std::chrono::microseconds spin() const override { return limits_.spin; }

 private:
  struct Frame {
    int peer = 0;
    Bytes bytes;  // none: the peer leaves
  };
  /// Sends or receives under way, the oldest first.
  struct Moves {
    std::vector<Frame> frames;
    std::vector<MPI_Request> requests;  // null: done
  };

  bool wait_for_room(int peer, std::size_t bytes);
  void send(int peer, Bytes&& bytes);
  void test(Moves& moves);
  void reap_sends();
  // True if a frame was delivered.
  bool reap_receives();
  bool receive(int peer, int count, MPI_Message& message);
  void deliver(Frame&& frame);
  bool take_leave() noexcept;
  template <class Done>
  bool progress_until(Done&& done, std::chrono::milliseconds at_most);

  void check(int code, int peer);
  [[noreturn]] void fail(const std::string& what, int peer);

  MPI_Comm comm_ = MPI_COMM_NULL;
  MpiLimits limits_;
  bool broken_ = false;
  Moves sends_, receives_;
  std::vector<std::size_t> sending_;    // bytes under way to each peer
  std::vector<std::size_t> receiving_;  // frames under way from each peer
  std::vector<char> gone_;              // by peer: has left
  Spares spares_;
  Buffer<float> native_;  // what MPI adds up
  std::vector<int> finished_;
  std::vector<MPI_Status> statuses_;
};

}  // namespace topreduce::comm
