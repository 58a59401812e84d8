#include "topreduce/comm/sockets.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "topreduce/comm/mailbox.h"
#include "topreduce/wire/little_endian.h"

namespace topreduce::comm {
namespace {

constexpr std::size_t kInput = std::size_t{1} << 16;
constexpr int kSizeBits = 30;
constexpr std::uint32_t kSize = (std::uint32_t{1} << kSizeBits) - 1;

std::string describe_error(int error) {
  return std::generic_category().message(error);
}

bool only_later(int error) {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

void set_option(int socket, int level, int option, int value) {
  // Not every kind of socket has these; it works without them.
  static_cast<void>(setsockopt(socket, level, option, &value, sizeof value));
}

// A machine that loses its power says nothing: the system asks, and gives up after two minutes.
void prepare(int socket) {
  const int flags = fcntl(socket, F_GETFL);
  if (flags < 0 || fcntl(socket, F_SETFL, flags | O_NONBLOCK) < 0) {
    throw std::system_error(errno, std::generic_category(), "sockets");
  }
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 30);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 15);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 6);
}

}  // namespace

Sockets::Sockets(std::vector<int> sockets) : peers_(sockets.size()), wake_(-1) {
  for (std::size_t i = 0; i < sockets.size(); ++i) peers_[i].socket = sockets[i];
  try {
    for (const int socket : sockets) {
      if (socket >= 0) prepare(socket);
    }
    wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (wake_ < 0) throw std::system_error(errno, std::generic_category(), "sockets");
    input_.resize(kInput);
    polled_.resize(peers_.size() + 1);
  } catch (...) {
    for (const int socket : sockets) {
      if (socket >= 0) close(socket);
    }
    if (wake_ >= 0) close(wake_);
    throw;
  }
}

Sockets::~Sockets() {
  for (const Peer& peer : peers_) {
    if (peer.socket >= 0) close(peer.socket);
  }
  close(wake_);
}

// ---- sending -----------------------------------------------------------------------------------

void Sockets::send(int peer, Kind kind, std::span<const std::byte> frame) {
  Peer& to = peers_[at(peer)];
  if (to.socket < 0 || !to.writes) return;  // that it is lost, those learn who wait for it
  std::array<std::byte, kHead> head;
  wire::store(head.data(), static_cast<std::uint32_t>(frame.size()) |
                               static_cast<std::uint32_t>(kind) << kSizeBits);
  std::size_t sent = 0;
  if (to.queue.empty()) {
    std::array<iovec, 2> parts{
        {{head.data(), head.size()}, {const_cast<std::byte*>(frame.data()), frame.size()}}};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    const ssize_t count = sendmsg(to.socket, &message, MSG_NOSIGNAL);
    if (count < 0 && !only_later(errno)) {
      to.writes = false;
      return;
    }
    sent = count < 0 ? 0 : static_cast<std::size_t>(count);
    if (sent == head.size() + frame.size()) return;
  }
  enqueue(to, head, frame, sent);
}

void Sockets::enqueue(Peer& peer, std::span<const std::byte> head, std::span<const std::byte> frame,
                      std::size_t sent) {
  Bytes rest = spares_.take(head.size() + frame.size() - sent);
  if (sent < head.size()) append(rest, head.subspan(sent));
  append(rest, frame.subspan(sent < head.size() ? 0 : sent - head.size()));
  peer.queue.push_back(std::move(rest));
}

void Sockets::flush(Peer& peer) {
  while (peer.writes && !peer.queue.empty()) {
    const std::span<const std::byte> rest = std::span(peer.queue.front()).subspan(peer.sent);
    const ssize_t count = ::send(peer.socket, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (count < 0) {
      if (only_later(errno)) return;
      peer.writes = false;
      break;
    }
    peer.sent += static_cast<std::size_t>(count);
    if (peer.sent < peer.queue.front().size()) return;
    spares_.give(std::move(peer.queue.front()));
    peer.queue.pop_front();
    peer.sent = 0;
  }
  if (!peer.writes) peer.queue.clear();
}

// ---- receiving ---------------------------------------------------------------------------------

void Sockets::move(const Receiver& receiver) {
  if (!ready(std::chrono::milliseconds(0))) return;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    if (polled_[i].revents == 0) continue;
    if (peers_[i].reads) read(static_cast<int>(i), receiver);
    flush(peers_[i]);
  }
}

void Sockets::read(int rank, const Receiver& receiver) {
  Peer& from = peers_[at(rank)];
  std::string why;
  for (;;) {
    // The rest of a long frame goes to its place at once.
    const bool direct = from.open && from.wanted - from.come >= kInput;
    const std::span<std::byte> room =
        direct ? std::span(from.frame).subspan(from.come) : std::span(input_);
    const ssize_t count = recv(from.socket, room.data(), room.size(), 0);
    if (count < 0 && only_later(errno)) return;
    if (count <= 0) {
      why = count == 0 ? "the connection was closed" : describe_error(errno);
      break;
    }
    const auto come = static_cast<std::size_t>(count);
    if (direct) {
      from.come += come;
      if (from.come == from.wanted) why = take(rank, {}, receiver);
    } else {
      why = take(rank, room.first(come), receiver);
    }
    if (!why.empty()) break;
    if (come < room.size()) return;  // that was all
  }
  from.reads = from.writes = false;
  from.queue.clear();
  receiver.lost(rank, why);
}

// Frames from the next bytes of a stream; returns what is wrong with them.
std::string Sockets::take(int rank, std::span<const std::byte> bytes, const Receiver& receiver) {
  Peer& from = peers_[at(rank)];
  const auto fill = [&](std::byte* place, std::size_t room) {
    const std::size_t count = std::min(room, bytes.size());
    if (count > 0) std::memcpy(place, bytes.data(), count);
    bytes = bytes.subspan(count);
    return count;
  };
  for (;;) {
    if (!from.open) {
      from.head_bytes += fill(from.head.data() + from.head_bytes, kHead - from.head_bytes);
      if (from.head_bytes < kHead) return {};
      const auto head = wire::load<std::uint32_t>(from.head.data());
      from.wanted = head & kSize;
      from.kind = static_cast<Kind>(head >> kSizeBits);
      if (from.wanted > kLargestFrame || from.kind > Kind::waits) {
        return "it sent bytes that are none of topreduce's";
      }
      from.frame.clear();
      make_room(from.frame, from.wanted);
      from.frame.resize(from.wanted);
      from.come = 0;
      from.open = true;
    }
    from.come += fill(from.frame.data() + from.come, from.wanted - from.come);
    if (from.come < from.wanted) return {};
    from.open = false;
    from.head_bytes = 0;
    receiver.frame(rank, from.kind, from.frame);
    if (bytes.empty()) return {};
  }
}

// ---- waiting -----------------------------------------------------------------------------------

bool Sockets::ready(std::chrono::milliseconds most) {
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const Peer& peer = peers_[i];
    short events = peer.reads ? POLLIN : 0;
    if (!peer.queue.empty()) events |= POLLOUT;
    polled_[i] = {events != 0 ? peer.socket : -1, events, 0};
  }
  polled_.back() = {wake_, POLLIN, 0};
  return poll(polled_.data(), polled_.size(), static_cast<int>(most.count())) > 0;
}

bool Sockets::wait(std::chrono::milliseconds most) {
  return ready(most) && polled_.back().revents != 0 && was_woken();
}

bool Sockets::wait_for_wake(std::chrono::nanoseconds most) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  const timespec time{static_cast<time_t>(most.count() / kSecond), most.count() % kSecond};
  pollfd polled{wake_, POLLIN, 0};
  return ppoll(&polled, 1, &time, nullptr) > 0 && was_woken();
}

// Since it was last asked.
bool Sockets::was_woken() {
  std::uint64_t count = 0;
  return ::read(wake_, &count, sizeof count) > 0;
}

void Sockets::wake() noexcept {
  const std::uint64_t one = 1;
  static_cast<void>(write(wake_, &one, sizeof one));
}

bool Sockets::queued() const {
  return std::ranges::any_of(peers_, [](const Peer& peer) { return !peer.queue.empty(); });
}

std::vector<int> Sockets::drain(std::chrono::milliseconds most) {
  const auto end = std::chrono::steady_clock::now() + most;
  for (;;) {
    std::vector<int> missing;
    bool queued = false;
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      Peer& peer = peers_[i];
      polled_[i] = {-1, 0, 0};
      if (peer.socket < 0 || !peer.writes) continue;
      flush(peer);
      int unacknowledged = 0;
      const bool known = ioctl(peer.socket, TIOCOUTQ, &unacknowledged) == 0;
      if (peer.queue.empty() && (!known || unacknowledged == 0)) continue;
      queued = queued || !peer.queue.empty();
      polled_[i] = {peer.socket, static_cast<short>(peer.queue.empty() ? 0 : POLLOUT), 0};
      missing.push_back(static_cast<int>(i));
    }
    if (missing.empty() || std::chrono::steady_clock::now() >= end) return missing;
    // Nothing tells when the last bytes are acknowledged; but that a peer is gone.
    static_cast<void>(poll(polled_.data(), peers_.size(), queued ? 10 : 1));
    for (const int rank : missing) {
      if ((polled_[at(rank)].revents & (POLLERR | POLLHUP)) != 0) peers_[at(rank)].writes = false;
    }
  }
}

}  // namespace topreduce::comm
