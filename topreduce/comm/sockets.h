#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <poll.h>
#include <span>
#include <string>
#include <vector>

#include "topreduce/api.h"
#include "topreduce/storage.h"

namespace topreduce::comm {

/// Frames over sockets that are connected already, one for each peer. Nothing waits: what the
/// system does not take at once stays here until it does. On the stream a frame is
///
///   its bytes, 30 bits, and above them two for its kind | the bytes
///
/// One thread at a time, but for `wake`.
class TOPREDUCE_API Sockets {
 public:
  /// Bytes for the mailbox; a last word; a sign of a peer that waits itself, without any bytes.
  enum class Kind : std::uint8_t { frame, word, waits };
  /// More than this in one frame is refused: what comes may be from anyone.
  static constexpr std::size_t kLargestFrame = std::size_t{1} << 22;

  /// Takes over the sockets, by rank; -1 where there is none.
  explicit Sockets(std::vector<int> sockets);
  ~Sockets();
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;

  void send(int peer, Kind kind, std::span<const std::byte> frame);

  struct Receiver {
    /// A frame, which the receiver may keep.
    std::function<void(int peer, Kind kind, Bytes& frame)> frame;
    /// Nothing more comes from a peer; called once.
    std::function<void(int peer, const std::string& why)> lost;
  };
  /// Passes on all that has come, and sends what waits, as far as that goes now.
  void move(const Receiver& receiver);

  /// Until something comes, or can be sent that waits, `wake` was called, or time is up. Whether it
  /// was called.
  bool wait(std::chrono::milliseconds most);
  /// Until `wake` was called, or time is up.
  bool wait_for_wake(std::chrono::nanoseconds most);
  /// Ends the wait of another thread, or the next one.
  void wake() noexcept;

  /// Whether anything waits to be sent.
  bool queued() const;
  /// Sends what waits, until the peers' systems have it, or time is up. Returns the ranks that
  /// still miss something.
  std::vector<int> drain(std::chrono::milliseconds most);

 private:
  static constexpr std::size_t kHead = 4;
  struct Peer {
    int socket = -1;
    bool writes = true, reads = true;  // until an error
    std::deque<Bytes> queue;           // frames with their heads
    std::size_t sent = 0;              // bytes of the first
    // What is coming.
    std::array<std::byte, kHead> head{};
    std::size_t head_bytes = 0;
    Kind kind = Kind::frame;
    Bytes frame;
    std::size_t wanted = 0, come = 0;  // bytes of it
    bool open = false;                 // its head is here
  };

  void enqueue(Peer& peer, std::span<const std::byte> head, std::span<const std::byte> frame,
               std::size_t sent);
  void flush(Peer& peer);
  void read(int rank, const Receiver& receiver);
  std::string take(int rank, std::span<const std::byte> bytes, const Receiver& receiver);
  bool ready(std::chrono::milliseconds most);
  bool was_woken();

  std::vector<Peer> peers_;
  std::vector<pollfd> polled_;  // by rank; the last one is `wake_`
  int wake_;
  Bytes input_;  // of one read
  Spares spares_;
};

}  // namespace topreduce::comm
