// The switch of the lab's cluster when its network has a delay.
//
//   relay <nanoseconds> <interface> ...
//
//   host 0  eth0 --> port0 --> held --\                 Each packet leaves so much later than it
//   host 1  eth0 --> port1 --> held ----> the port of   came. The kernel notes when that was: to
//   host 2  eth0 --> port2 --> held --/   its address   read it late does not make it later.
//
// Packets pass as they are, also those that a network card would cut or add checksums to
// (PACKET_VNET_HDR); the limits of rate stand at the interfaces. Says "here" once it listens. Any
// input is answered with how many packets left since the last answer, and how many of them more
// than a tenth of the delay too late; the end of the input ends it.

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <limits>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <memory>
#include <net/if.h>
#include <optional>
#include <poll.h>
#include <sched.h>
#include <span>
#include <string>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <system_error>
#include <time.h>
#include <unistd.h>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using Nanoseconds = std::int64_t;
using Packet = std::span<const std::byte>;  // what PACKET_VNET_HDR puts first, then the frame

constexpr Nanoseconds kSecond = 1'000'000'000;
constexpr Nanoseconds kLongestNap = 500'000;  // what comes meanwhile waits in the kernel's buffer
constexpr Nanoseconds kTogether = 100'000;    // packets due within this time leave at its end
constexpr Nanoseconds kNever = std::numeric_limits<Nanoseconds>::max();
constexpr std::size_t kOffloadBytes = 10;  // a virtio_net_hdr, which is no C++ (linux/virtio_net.h)
constexpr std::size_t kLongestPacket = kOffloadBytes + ETH_HLEN + (64 << 10);
constexpr std::size_t kChunkBytes = 16 * kLongestPacket;
constexpr int kBufferBytes = 16 << 20;
constexpr std::size_t kMostSenders = 32;

Nanoseconds time_on(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return time.tv_sec * kSecond + time.tv_nsec;
}

// ---- what is on its way -------------------------------------------------------------------------

/// Packets of one port in their order, in memory that is used again.
class Held {
 public:
  bool empty() const { return packets_.empty(); }
  Nanoseconds due() const { return packets_.front().due; }
  Packet front() const { return packets_.front().bytes; }

  /// Room for the longest packet, valid until the next call.
  std::byte* room() {
    if (chunks_.empty() || chunks_.back().used + kLongestPacket > kChunkBytes) {
      if (spare_.empty()) spare_.push_back({std::make_unique<std::byte[]>(kChunkBytes)});
      chunks_.push_back(std::move(spare_.back()));
      spare_.pop_back();
    }
    return chunks_.back().bytes.get() + chunks_.back().used;
  }

  /// Keeps what was written to `room`.
  void push(std::size_t size, Nanoseconds due) {
    Chunk& chunk = chunks_.back();
    packets_.push_back({due, {chunk.bytes.get() + chunk.used, size}});
    chunk.used += size;
    ++chunk.packets;
  }

  void pop() {
    packets_.pop_front();
    Chunk& chunk = chunks_.front();
    if (--chunk.packets > 0) return;
    chunk.used = 0;
    if (chunks_.size() == 1) return;
    spare_.push_back(std::move(chunk));
    chunks_.pop_front();
  }

 private:
  struct Entry {
    Nanoseconds due;
    Packet bytes;
  };

  struct Chunk {
    std::unique_ptr<std::byte[]> bytes;
    std::size_t used = 0;
    std::size_t packets = 0;
  };

  std::deque<Entry> packets_;
  std::deque<Chunk> chunks_;
  std::vector<Chunk> spare_;
};

// ---- sockets ------------------------------------------------------------------------------------

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

void set(int file, int level, int option, int value) {
  if (setsockopt(file, level, option, &value, sizeof value) != 0) fail("setsockopt");
}

/// Only root of the machine may have more than net.core.rmem_max and wmem_max.
void enlarge(int file, int forced, int plain) {
  if (setsockopt(file, SOL_SOCKET, forced, &kBufferBytes, sizeof kBufferBytes) == 0) return;
  set(file, SOL_SOCKET, plain, kBufferBytes);
}

/// A raw socket at an interface; of protocol 0 it receives nothing.
int open_socket(const char* interface, std::uint16_t protocol) {
  const int file = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (file < 0) fail("a raw socket");
  set(file, SOL_PACKET, PACKET_VNET_HDR, 1);
  set(file, SOL_PACKET, PACKET_IGNORE_OUTGOING, 1);
  set(file, SOL_SOCKET, SO_TIMESTAMPNS, 1);
  enlarge(file, SO_RCVBUFFORCE, SO_RCVBUF);
  enlarge(file, SO_SNDBUFFORCE, SO_SNDBUF);
  sockaddr_ll address{};
  address.sll_family = AF_PACKET;
  address.sll_protocol = htons(protocol);
  address.sll_ifindex = static_cast<int>(if_nametoindex(interface));
  if (address.sll_ifindex == 0) fail(interface);
  if (bind(file, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) fail(interface);
  return file;
}

/// When the kernel saw the packet, on the clock of the day.
std::optional<Nanoseconds> stamp(msghdr& message) {
  for (cmsghdr* each = CMSG_FIRSTHDR(&message); each; each = CMSG_NXTHDR(&message, each)) {
    if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_TIMESTAMPNS) continue;
    timespec time{};
    std::memcpy(&time, CMSG_DATA(each), sizeof time);
    return time.tv_sec * kSecond + time.tv_nsec;
  }
  return std::nullopt;
}

/// One end of a host's link.
class Port {
 public:
  explicit Port(const char* interface)
      : interface_(interface), receiver_(open_socket(interface, ETH_P_ALL)) {
    senders_.push_back(open_socket(interface, 0));
  }

  int receiver() const { return receiver_; }
  Held& held() { return held_; }

  /// Reads all that has come.
  void take(Nanoseconds delay) {
    while (true) {
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof(timespec))];
      iovec room{held_.room(), kLongestPacket};
      msghdr message{};
      message.msg_iov = &room;
      message.msg_iovlen = 1;
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      const ssize_t size = recvmsg(receiver_, &message, 0);
      if (size < 0) return;
      if ((message.msg_flags & MSG_TRUNC) || size < ssize_t{kOffloadBytes + ETH_HLEN}) {
        continue;
      }
      // A change of the clock of the day must not hold a packet back.
      const Nanoseconds today = time_on(CLOCK_REALTIME);
      const Nanoseconds age =
          std::clamp<Nanoseconds>(today - stamp(message).value_or(today), 0, delay);
      held_.push(static_cast<std::size_t>(size), time_on(CLOCK_MONOTONIC) + delay - age);
    }
  }

  /// A packet that the interface's queue has no room for is lost, as in any switch.
  void send(Packet packet) {
    // What stands in the queue counts against the socket that sent it: a full one hands over.
    for (std::size_t i = 0; i < kMostSenders; ++i) {
      if (::send(senders_[sender_], packet.data(), packet.size(), 0) >= 0 || errno != EAGAIN)
        return;
      if (i + 1 == senders_.size() && i + 1 < kMostSenders) {
        senders_.push_back(open_socket(interface_, 0));
        sender_ = senders_.size() - 1;
      } else {
        sender_ = (sender_ + 1) % senders_.size();
      }
    }
  }

 private:
  const char* interface_;
  int receiver_;
  std::vector<int> senders_;
  std::size_t sender_ = 0;
  Held held_;
};

// ---- the switch ---------------------------------------------------------------------------------

std::uint64_t hardware_address(const std::byte* bytes) {
  std::uint64_t address = 0;
  std::memcpy(&address, bytes, ETH_ALEN);
  return address;
}

class Switch {
 public:
  Switch(std::span<char* const> interfaces, Nanoseconds delay) : delay_(delay) {
    for (const char* each : interfaces) ports_.emplace_back(each);
  }

  /// Until standard input ends.
  void run() {
    std::vector<pollfd> files{{STDIN_FILENO, POLLIN, 0}};
    for (const Port& each : ports_) files.push_back({each.receiver(), POLLIN, 0});
    while (!files[0].revents || answer()) {
      for (Port& each : ports_) each.take(delay_);
      const Nanoseconds due = deliver();
      // While packets wait there is no need to wake up for others, which are due later.
      const bool idle = due == kNever;
      const timespec nap{0, idle ? 0 : nap_until(due)};
      if (ppoll(files.data(), idle ? files.size() : 1, idle ? nullptr : &nap, nullptr) < 0 &&
          errno != EINTR) {
        fail("ppoll");
      }
    }
  }

 private:
  /// False at the end of the input.
  bool answer() {
    char question[64];
    if (read(STDIN_FILENO, question, sizeof question) <= 0) return false;
    std::printf("%lld %lld\n", std::exchange(packets_, 0), std::exchange(late_, 0));
    std::fflush(stdout);
    return true;
  }

  /// Sends what is due; returns when the next packet is.
  Nanoseconds deliver() {
    const Nanoseconds now = time_on(CLOCK_MONOTONIC);
    Nanoseconds next = kNever;
    for (std::size_t from = 0; from < ports_.size(); ++from) {
      Held& held = ports_[from].held();
      for (; !held.empty() && held.due() <= now; held.pop()) {
        forward(held.front(), from);
        delivered_ = now;
        ++packets_;
        late_ += now - held.due() > delay_ / 10;
      }
      if (!held.empty()) next = std::min(next, held.due());
    }
    return next;
  }

  Nanoseconds nap_until(Nanoseconds due) const {
    const Nanoseconds now = time_on(CLOCK_MONOTONIC);
    const Nanoseconds together = std::min(kTogether, delay_ / 20);
    const Nanoseconds left = std::max(due, delivered_ + together) - now;
    return std::clamp<Nanoseconds>(left, 0, std::min(delay_, kLongestNap));
  }

  void forward(Packet packet, std::size_t from) {
    const std::byte* frame = packet.data() + kOffloadBytes;
    places_[hardware_address(frame + ETH_ALEN)] = from;
    const auto place = places_.find(hardware_address(frame));
    if (place != places_.end()) return ports_[place->second].send(packet);
    for (std::size_t to = 0; to < ports_.size(); ++to) {
      if (to != from) ports_[to].send(packet);
    }
  }

  Nanoseconds delay_;
  Nanoseconds delivered_ = 0;  // when packets last left
  long long packets_ = 0;
  long long late_ = 0;
  std::deque<Port> ports_;
  std::unordered_map<std::uint64_t, std::size_t> places_;  // which port an address is behind
};

/// Wakes up on time where it may: the ranks keep all cores busy.
void hurry() {
  prctl(PR_SET_TIMERSLACK, 1);
  sched_param priority{};
  priority.sched_priority = 1;
  sched_setscheduler(0, SCHED_FIFO, &priority);
}

}  // namespace

int main(int count, char** words) {
  try {
    const std::span<char* const> interfaces(words + std::min(count, 2), words + count);
    Switch between(interfaces, count > 1 ? std::strtoll(words[1], nullptr, 10) : 0);
    hurry();
    std::puts("here");
    std::fflush(stdout);
    between.run();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "relay: %s\n", error.what());
    return 1;
  }
}
