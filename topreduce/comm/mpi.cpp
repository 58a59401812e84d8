// An exchange goes in turns. In turn t every rank sends to the rank t places after it and receives
// from the one t places before it, so that no rank is everyone's partner at once:
//
//   turn 1:  0 -> 1 -> 2 -> 3 -> 0        turn 2:  0 <-> 2, 1 <-> 3        turn 3: as 1, backwards
//
// A few turns are under way at the same time. Lengths go first, each in a message of its own; the
// parts of the first turns follow without waiting for an answer, so small ones arrive together with
// their lengths and the exchange takes one trip through the network.

#include "topreduce/comm/mpi.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>

namespace topreduce::comm {
namespace {

constexpr int kLength = 1, kPart = 2;  // tags
constexpr int kEveryone = -1;          // as a partner: the call concerns all ranks

void expect_running() {
  int started = 0, ended = 0;
  MPI_Initialized(&started);
  MPI_Finalized(&ended);
  if (started == 0 || ended != 0) {
    throw std::invalid_argument(
        "Mpi: MPI is not running; use it between MPI_Init and "
        "MPI_Finalize");
  }
}

std::string text_of(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return "error " + std::to_string(code);
  return {text, static_cast<std::size_t>(length)};
}

}  // namespace

Mpi::Mpi(MPI_Comm comm, MpiLimits limits) : limits_(limits) {
  constexpr std::size_t kMost = std::numeric_limits<int>::max();
  if (limits.piece < 1 || limits.piece > kMost || limits.partners < 1) {
    throw std::invalid_argument("Mpi: a piece has 1 to " + std::to_string(kMost) +
                                " bytes, and there is at least 1 partner at once");
  }
  expect_running();
  call_ = "Mpi";
  check(MPI_Comm_dup(comm, &comm_), kEveryone);
  check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), kEveryone);
  check(MPI_Comm_rank(comm_, &rank_), kEveryone);
  check(MPI_Comm_size(comm_, &size_), kEveryone);
  const auto ranks = static_cast<std::size_t>(size_);
  lengths_out_.resize(ranks);
  lengths_in_.resize(ranks);
  starts_out_.resize(ranks);
  starts_in_.resize(ranks);
}

Mpi::~Mpi() {
  // After a failure messages may still be under way; a communicator that took over the place of
  // this one would receive them.
  if (broken_) return;
  int ended = 0;
  if (MPI_Finalized(&ended) == MPI_SUCCESS && ended == 0) MPI_Comm_free(&comm_);
}

template <class PartFor>
void Mpi::exchange(PartFor part_for, Inbox& inbox) {
  if (broken_) fail("this communicator has failed before", kEveryone);
  const auto to = [&](int turn) { return (rank_ + turn) % size_; };
  const auto from = [&](int turn) { return (rank_ + size_ - turn) % size_; };
  const auto at = [](int rank) { return static_cast<std::size_t>(rank); };
  const int turns = size_ - 1, at_once = std::min(limits_.partners, turns);
  for (Moves* moves : {&lengths_, &sends_, &receives_}) {
    moves->started.clear();
    moves->ends.assign(1, 0);
  }

  for (int turn = 1; turn <= turns; ++turn) {
    std::uint64_t& incoming = lengths_in_[at(from(turn))];
    std::uint64_t& outgoing = lengths_out_[at(to(turn))];
    outgoing = part_for(at(to(turn))).size();
    receive(std::as_writable_bytes(std::span(&incoming, 1)), from(turn), kLength, lengths_);
    send(std::as_bytes(std::span(&outgoing, 1)), to(turn), kLength, lengths_);
    lengths_.ends.push_back(lengths_.started.size());
  }
  const auto send_part = [&](int turn) {
    send(part_for(at(to(turn))), to(turn), kPart, sends_);
    sends_.ends.push_back(sends_.started.size());
  };
  for (int turn = 1; turn <= at_once; ++turn) send_part(turn);
  for (int turn = 1; turn <= turns; ++turn) wait(lengths_, turn);

  const auto own = part_for(at(rank_));
  lengths_in_[at(rank_)] = own.size();
  inbox.counts.assign(lengths_in_.begin(), lengths_in_.end());
  std::size_t total = 0;
  for (std::size_t r = 0; r < starts_in_.size(); total += inbox.counts[r++]) starts_in_[r] = total;
  make_room(inbox.bytes, total);
  inbox.bytes.resize(total);
  const auto room_for = [&](int rank) {
    return std::span(inbox.bytes).subspan(starts_in_[at(rank)], inbox.counts[at(rank)]);
  };

  const auto finish = [&](int turn) {
    wait(sends_, turn);
    wait(receives_, turn);
  };
  for (int turn = 1; turn <= turns; ++turn) {
    if (turn > at_once) {
      finish(turn - at_once);
      send_part(turn);
    }
    receive(room_for(from(turn)), from(turn), kPart, receives_);
    receives_.ends.push_back(receives_.started.size());
  }
  std::ranges::copy(own, room_for(rank_).begin());
  for (int turn = turns - at_once + 1; turn <= turns; ++turn) finish(turn);
}

// Pieces of a part keep their order, since they have the same tag.
void Mpi::send(std::span<const std::byte> bytes, int partner, int tag, Moves& moves) {
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(bytes.size(), limits_.piece))) {
    const auto length = static_cast<int>(std::min(bytes.size(), limits_.piece));
    Move& move = moves.started.emplace_back(Move{MPI_REQUEST_NULL, partner});
    check(MPI_Isend(bytes.data(), length, MPI_BYTE, partner, tag, comm_, &move.request), partner);
  }
}

void Mpi::receive(std::span<std::byte> bytes, int partner, int tag, Moves& moves) {
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(bytes.size(), limits_.piece))) {
    const auto length = static_cast<int>(std::min(bytes.size(), limits_.piece));
    Move& move = moves.started.emplace_back(Move{MPI_REQUEST_NULL, partner});
    check(MPI_Irecv(bytes.data(), length, MPI_BYTE, partner, tag, comm_, &move.request), partner);
  }
}

void Mpi::wait(Moves& moves, int turn) {
  const auto t = static_cast<std::size_t>(turn);
  for (std::size_t i = moves.ends[t - 1]; i < moves.ends[t]; ++i) {
    Move& move = moves.started[i];
    wait(move.request, move.partner);
  }
}

// MPI_Wait would keep the core busy for as long as the network takes; the gradients of the next
// layers can use it better, and so can a rank that shares it.
void Mpi::wait(MPI_Request& request, int partner) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds kNap(20);
  const auto impatient = Clock::now() + limits_.spin;
  for (int done = 0;;) {
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), partner);
    if (done != 0) return;
    if (Clock::now() < impatient) continue;
    std::this_thread::sleep_for(kNap);
  }
}

void Mpi::check(int code, int partner) {
  if (code != MPI_SUCCESS) fail(text_of(code), partner);
}

// What was started cannot be taken back for certain: MPI is asked to forget it, and this
// communicator is not used again.
void Mpi::fail(const std::string& what, int partner) {
  broken_ = true;
  for (Moves* moves : {&lengths_, &sends_, &receives_}) {
    for (Move& move : moves->started) {
      if (move.request == MPI_REQUEST_NULL) continue;
      MPI_Cancel(&move.request);
      MPI_Request_free(&move.request);
    }
  }
  throw CommError(std::string(call_) + " on rank " + std::to_string(rank_) +
                  (partner == kEveryone ? "" : ", with rank " + std::to_string(partner)) + ": " +
                  what);
}

void Mpi::do_all_to_all(std::span<const std::byte> send, std::span<const std::size_t> counts,
                        Inbox& inbox) {
  call_ = "all_to_all";
  for (std::size_t r = 0, start = 0; r < counts.size(); start += counts[r++])
    starts_out_[r] = start;
  exchange([&](std::size_t r) { return send.subspan(starts_out_[r], counts[r]); }, inbox);
}

void Mpi::do_all_gather(std::span<const std::byte> mine, Inbox& inbox) {
  call_ = "all_gather";
  exchange([mine](std::size_t) { return mine; }, inbox);
}

void Mpi::do_barrier() {
  call_ = "barrier";
  if (broken_) fail("this communicator has failed before", kEveryone);
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Ibarrier(comm_, &request), kEveryone);
  wait(request, kEveryone);
}

}  // namespace topreduce::comm
