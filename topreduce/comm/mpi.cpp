// A frame is one message of MPI, all with one tag, so that those of a peer keep their order. It is
// copied and sent without waiting. The receiver probes for whatever has come, and takes it from MPI
// in the order in which it was sent.
//
// A rank that leaves sends an empty message, its last, and waits for those of the others: what came
// before it has then been received, and no later communicator can meet it.

#include "topreduce/comm/mpi.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace topreduce::comm {
namespace {

constexpr int kTag = 1;
constexpr int kEveryone = -1;                                // as a peer: the call concerns all
constexpr std::size_t kMostUnderWay = std::size_t{1} << 26;  // bytes to one peer
constexpr std::chrono::seconds kForLong(3);

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

int rank_in(MPI_Comm comm, const MpiLimits& limits) {
  constexpr std::size_t kLeast = Mailbox::kFrameHead + 1, kMost = std::numeric_limits<int>::max();
  if (limits.piece < kLeast || limits.piece > kMost) {
    throw std::invalid_argument("Mpi: a piece has " + std::to_string(kLeast) + " to " +
                                std::to_string(kMost) + " bytes, not " +
                                std::to_string(limits.piece));
  }
  expect_running();
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  return rank;
}

int size_of(MPI_Comm comm) {
  int size = 1;
  MPI_Comm_size(comm, &size);
  return size;
}

std::string text_of(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return "error " + std::to_string(code);
  return {text, static_cast<std::size_t>(length)};
}

}  // namespace

Mpi::Mpi(MPI_Comm comm, MpiLimits limits)
    : Communicator(rank_in(comm, limits), size_of(comm)), limits_(limits) {
  check(MPI_Comm_dup(comm, &comm_), kEveryone);
  check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), kEveryone);
  sending_.resize(at(size()));
  receiving_.resize(at(size()));
  gone_.resize(at(size()));
  set_timeout(limits.timeout);
}

void Mpi::set_timeout(std::chrono::milliseconds timeout) {
  Communicator::set_timeout(timeout);
  limits_.timeout = timeout;
}

Mpi::~Mpi() {
  int ended = 0;
  if (MPI_Finalized(&ended) != MPI_SUCCESS || ended != 0) return;
  if (take_leave()) {
    MPI_Comm_free(&comm_);
    return;
  }
  // Messages may still be under way. A communicator that took over the place of this one would
  // receive them, and MPI may still use their memory: both stay for as long as MPI does.
  new Moves(std::move(sends_));
  new Moves(std::move(receives_));
  new Buffer<float>(std::move(native_));
}

// Whether nothing is under way any more.
bool Mpi::take_leave() noexcept {
  try {
    if (broken_) {  // others may wait; if MPI can still tell them, it does
      for (int peer = 0; peer < size(); ++peer) {
        MPI_Request request = MPI_REQUEST_NULL;
        if (peer == rank()) continue;
        if (MPI_Isend(nullptr, 0, MPI_BYTE, peer, kTag, comm_, &request) != MPI_SUCCESS) continue;
        MPI_Request_free(&request);
      }
      return false;
    }
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) send(peer, {});
    }
    gone_[at(rank())] = 1;
    const auto all_gone = [&] { return std::ranges::find(gone_, char{0}) == gone_.end(); };
    return progress_until([&] { return sends_.frames.empty() && all_gone(); }, kForLong);
  } catch (...) {
    return false;
  }
}

// False if it is not done in time.
template <class Done>
bool Mpi::progress_until(Done&& done, std::chrono::milliseconds at_most) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + at_most;
  for (const Backoff backoff(limits_.spin); !done(); backoff.pause()) {
    receive_frames();
    if (Clock::now() >= end) return done();
  }
  return true;
}

// ---- sending -----------------------------------------------------------------------------------

void Mpi::send_frame(int peer, std::span<const std::byte> frame) {
  if (!wait_for_room(peer, frame.size())) return;
  Bytes copy = spares_.take(frame.size());
  append(copy, frame);
  send(peer, std::move(copy));
}

void Mpi::hand_over(int peer, Bytes& frame) {
  if (!wait_for_room(peer, frame.size())) return;
  Bytes other = spares_.take(frame.size());
  std::swap(frame, other);
  send(peer, std::move(other));
}

// Receives meanwhile: the peer may be waiting for the same. False if the peer has left, and so
// reads no more.
bool Mpi::wait_for_room(int peer, std::size_t bytes) {
  if (broken_) fail("this communicator has failed before", kEveryone);
  const auto fits = [&] {
    return gone_[at(peer)] != 0 || sending_[at(peer)] == 0 ||
           sending_[at(peer)] + bytes <= kMostUnderWay;
  };
  if (!fits() && !progress_until(fits, limits_.timeout)) {
    fail("it accepted no bytes within the time-out", peer);
  }
  return gone_[at(peer)] == 0;
}

void Mpi::send(int peer, Bytes&& bytes) {
  sending_[at(peer)] += bytes.size();
  const Frame& frame = sends_.frames.emplace_back(Frame{peer, std::move(bytes)});
  sends_.requests.push_back(MPI_REQUEST_NULL);
  check(MPI_Isend(frame.bytes.data(), static_cast<int>(frame.bytes.size()), MPI_BYTE, peer, kTag,
                  comm_, &sends_.requests.back()),
        peer);
}

void Mpi::reap_sends() {
  test(sends_);
  for (std::size_t i = sends_.frames.size(); i-- > 0;) {
    if (sends_.requests[i] != MPI_REQUEST_NULL) continue;
    Frame& frame = sends_.frames[i];
    sending_[at(frame.peer)] -= frame.bytes.size();
    spares_.give(std::move(frame.bytes));
    std::swap(frame, sends_.frames.back());
    std::swap(sends_.requests[i], sends_.requests.back());
    sends_.frames.pop_back();
    sends_.requests.pop_back();
  }
}

// Ranks that share cores get nowhere if one of them computes while its bytes wait to be fetched.
void Mpi::drain() {
  progress_until([&] { return sends_.frames.empty(); }, kForLong);
}

// ---- receiving ---------------------------------------------------------------------------------

bool Mpi::receive_frames() {
  if (broken_) fail("this communicator has failed before", kEveryone);
  if (size() == 1) return true;
  reap_sends();
  if (reap_receives()) return true;
  for (;;) {
    int found = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check(MPI_Improbe(MPI_ANY_SOURCE, kTag, comm_, &found, &message, &status), kEveryone);
    if (found == 0) return true;
    int count = 0;
    check(MPI_Get_count(&status, MPI_BYTE, &count), status.MPI_SOURCE);
    // Another look, in vain, would give the core away, while this frame may be all that is missing.
    if (receive(status.MPI_SOURCE, count, message)) return true;
  }
}

bool Mpi::receive(int peer, int count, MPI_Message& message) {
  Frame frame{peer, spares_.take(static_cast<std::size_t>(count))};
  frame.bytes.resize(static_cast<std::size_t>(count));
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Imrecv(frame.bytes.data(), count, MPI_BYTE, &message, &request), peer);
  if (receiving_[at(peer)] == 0) {  // short ones are here already
    int done = 0;
    const int code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (code == MPI_SUCCESS && done != 0) {
      deliver(std::move(frame));
      return true;
    }
    check(code, peer);
  }
  receives_.frames.push_back(std::move(frame));
  receives_.requests.push_back(request);
  ++receiving_[at(peer)];
  return false;
}

// Takes those that are done, but none before an earlier one of the same peer.
bool Mpi::reap_receives() {
  test(receives_);
  const std::size_t before = receives_.frames.size();
  for (std::size_t i = 0; i < receives_.frames.size();) {
    const auto place = static_cast<std::ptrdiff_t>(i);
    const auto earlier = std::span(receives_.frames).first(i);
    const int peer = receives_.frames[i].peer;
    if (receives_.requests[i] != MPI_REQUEST_NULL ||
        std::ranges::find(earlier, peer, &Frame::peer) != earlier.end()) {
      ++i;
      continue;
    }
    Frame frame = std::move(receives_.frames[i]);
    receives_.frames.erase(receives_.frames.begin() + place);
    receives_.requests.erase(receives_.requests.begin() + place);
    --receiving_[at(peer)];
    deliver(std::move(frame));
  }
  return receives_.frames.size() < before;
}

void Mpi::deliver(Frame&& frame) {
  if (frame.bytes.empty()) {
    gone_[at(frame.peer)] = 1;
    mailbox().lose(frame.peer, Loss::gone, "has left the group");
  } else {
    mailbox().accept(frame.peer, frame.bytes);
  }
  spares_.give(std::move(frame.bytes));
}

// ---- both --------------------------------------------------------------------------------------

// Requests that are done become null.
void Mpi::test(Moves& moves) {
  if (moves.requests.empty()) return;
  finished_.resize(moves.requests.size());
  statuses_.resize(moves.requests.size());
  int count = 0;
  const int code = MPI_Testsome(static_cast<int>(moves.requests.size()), moves.requests.data(),
                                &count, finished_.data(), statuses_.data());
  if (code == MPI_SUCCESS) return;
  int kind = code;
  MPI_Error_class(code, &kind);
  for (int i = 0; kind == MPI_ERR_IN_STATUS && i < count; ++i) {
    const auto place = static_cast<std::size_t>(finished_[static_cast<std::size_t>(i)]);
    check(statuses_[static_cast<std::size_t>(i)].MPI_ERROR, moves.frames[place].peer);
  }
  check(code, kEveryone);
}

void Mpi::check(int code, int peer) {
  if (code != MPI_SUCCESS) fail(text_of(code), peer);
}

void Mpi::fail(const std::string& what, int peer) {
  broken_ = true;
  throw CommError("MPI on rank " + std::to_string(rank()) + ", " + mailbox().whereabouts() +
                  (peer == kEveryone ? "" : ", with rank " + std::to_string(peer)) + ": " + what);
}

void Mpi::do_native_all_reduce(std::span<float> values) {
  constexpr std::size_t kMost = std::numeric_limits<int>::max();
  for (; !values.empty(); values = values.subspan(std::min(values.size(), kMost))) {
    const auto count = static_cast<int>(std::min(values.size(), kMost));
    // A copy: should this rank give up, MPI may still write to it.
    native_.assign(values.begin(), values.begin() + count);
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Iallreduce(MPI_IN_PLACE, native_.data(), count, MPI_FLOAT, MPI_SUM, comm_, &request),
          kEveryone);
    int done = 0;
    for (const Backoff backoff(spin());; backoff.pause()) {
      check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), kEveryone);
      if (done != 0) break;
      if (backoff.waited() > limits_.timeout) {
        fail("the all-reduce did not end within the time-out", kEveryone);
      }
    }
    std::copy_n(native_.begin(), count, values.begin());
  }
}

}  // namespace topreduce::comm
