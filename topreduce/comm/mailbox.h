#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "topreduce/api.h"
#include "topreduce/storage.h"

namespace topreduce::comm {

/// What a message is for: an exchange, and a round of it.
struct Tag {
  std::uint32_t exchange = 0;
  std::uint32_t round = 0;
  bool operator==(const Tag&) const = default;
};
/// The exchanges that collectives, votes and a transport's own all-reduces belong to; all others
/// are numbered by a parameter.
inline constexpr std::uint32_t kCollective = 0xffffffff, kVote = 0xfffffffe, kNative = 0xfffffffd;

/// Where a rank is in its program. Ranks that exchange messages must be at the same place; those
/// that are not find out, instead of waiting for each other or mixing up their messages.
struct TOPREDUCE_API Place {
  enum class Kind : std::uint8_t {
    start,
    attach,
    agree,
    configure,
    bypass,
    compress,
    step,
    order,
    load,
    rebuild
  };
  Kind kind = Kind::start;
  std::uint64_t step = 0;
  bool operator==(const Place&) const = default;
};
TOPREDUCE_API std::string to_string(const Place& place);

/// What a message is part of.
enum class Phase : std::uint8_t { agreement, exchange, vote };
TOPREDUCE_API Phase phase_of(const Place& place, const Tag& tag);
/// The place, and there the part of the program that a message belongs to: "step 4, the vote".
TOPREDUCE_API std::string to_string(const Place& place, const Tag& tag);

/// How a peer was lost: nothing more will come of it, or its bytes cannot be used.
enum class Loss { gone, damaged };

/// What one rank has received. Frames are put in by whoever receives them, which may be another
/// thread; messages are taken out by the rank's own thread. A frame is
///
///   "TP" | version | place, 8 + 64 bits | epoch, 32 bits | check, 16 bits | any part of the stream
///
/// or, if an earlier frame of the epoch has said all that, a short one:
///
///   "t" | any part of the stream of messages
///
/// where the highest bit of the place says that some rank is elsewhere,
/// and the stream of a peer is its messages one after the other, each
///
///   exchange, round, bytes: LEB128 | the bytes
///
/// An epoch is one stay at a place: all ranks count them alike, so what comes of an epoch that this
/// rank has left for good is dropped, and what comes early waits.
class TOPREDUCE_API Mailbox {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kFrameHead = 18;
  static constexpr std::byte kShortHead{'t'};

  explicit Mailbox(int ranks);

  // ---- whoever receives ----

  void accept(int peer, std::span<const std::byte> frame);
  /// The same for a buffer that may be kept, if another is left: a long message need not be copied.
  void accept(int peer, Bytes& frame);
  /// Nothing more will come from `peer`; `why` says what it did: "has left". Of several reasons the
  /// first counts.
  void lose(int peer, Loss loss, const std::string& why);
  /// Peers that this rank waits for, unless they are lost.
  std::vector<int> awaited() const;

  /// How long to wait for a peer from which nothing comes; after that it is lost.
  void set_timeout(Clock::duration timeout);

  /// How errors call this rank, "rank 0 of 4", and the number that each rank has in them.
  void set_names(std::string title, std::vector<int> names);
  std::string name(int rank) const;

  // ---- the rank itself ----

  std::uint32_t epoch() const { return epoch_; }
  const Place& place() const { return place_; }
  void enter(const Place& place);
  /// There is no way back any more: forgets what is left of earlier places.
  void stay();
  /// Takes the last `enter` back, before `stay`.
  void leave();

  /// From now on this rank waits for a message from `peer`.
  void expect(const Tag& tag, int peer);
  /// How many of the messages that were asked for, by `expect`, are here.
  std::size_t arrived(const Tag& tag) const;
  /// One that has arrived; valid until `release`.
  std::span<const std::byte> message(const Tag& tag, int peer) const;
  void release(const Tag& tag);

  /// A number that changes whenever something comes.
  std::uint64_t version() const;
  /// Until the version is another one than `known`, or a peer has been silent for too long.
  void wait(std::uint64_t known);
  /// This rank starts to wait: what peers did not send while it computed is no silence.
  void start_waiting();
  /// Counts as lost the peers that this rank waits for and from which nothing came for too long.
  void lose_silent();

  /// Throws CommError or WireError if a peer is lost from which something is expected.
  void check(int rank) const;
  /// Throws WireError if a peer has gone on without sending what is expected.
  void check_left(int rank) const;
  /// From now on, and until the next `enter`, this rank waits to hear from every peer.
  void expect_all();
  /// Whether a peer is at another place, or has noticed one; its frames of this epoch say so.
  bool differs() const;
  /// Whether every peer has been heard from in this epoch.
  bool heard_all(int rank) const;
  /// By rank, where the peers are in this epoch, in words.
  std::string places(int rank) const;
  std::string title(int rank) const;
  /// Where this rank is, and what it waits for: "step 4, the vote".
  std::string whereabouts() const;

  std::uint64_t bytes_received() const;
  std::uint64_t bytes_received_here() const;  ///< of this epoch

  /// Frees memory for messages far longer than those that came since the last call.
  void trim();

 private:
  static constexpr std::size_t kMostHead = 27;  // bytes: three numbers

  struct Message {
    Bytes bytes;
    std::size_t start = 0;  // before it, what else was in the frame
    bool here = false;
    bool asked = false;     // this rank has said that it wants it
    bool expected = false;  // and waits for it
  };
  struct Slot {  // the messages of one tag
    bool used = false;
    std::uint32_t epoch = 0;
    Tag tag;
    std::size_t count = 0;          // of those that are asked for and here
    std::vector<Message> messages;  // by peer
  };
  struct PeerPlace {
    std::uint32_t epoch = 0;
    Place place;
    bool differs = false;  // it knows of a rank that is elsewhere
    std::uint64_t bytes = 0;
  };
  struct Peer {
    bool heard = false;             // of anything yet
    std::uint32_t epoch = 0;        // of its last frame
    std::vector<PeerPlace> places;  // in this epoch and later ones
    bool lost = false;
    Loss loss = Loss::gone;
    std::string why;
    std::size_t expected = 0;  // messages that this rank waits for
    Clock::time_point since;   // how long it has waited for them without a word of this peer
    // The message that its stream is in the middle of.
    Tag tag;
    std::size_t missing = 0;  // bytes still to come
    bool in_message = false;
    std::array<std::byte, kMostHead> head{};  // of a message that a frame cut
    std::size_t head_bytes = 0;               // bytes of it that are here
    Message* target = nullptr;
  };

  Slot* find(std::uint32_t epoch, const Tag& tag) const;
  Slot& find_or_make(std::uint32_t epoch, const Tag& tag);
  void accept(int peer, std::span<const std::byte> frame, Bytes* buffer);
  void read(int peer, std::span<const std::byte> stream, Bytes* buffer);
  void finish_message(int peer);
  void count_received(Peer& from, std::size_t bytes);
  void drop(Slot& slot);
  void drop_before(std::uint32_t epoch);
  void expect_nothing();
  const PeerPlace* place_of(const Peer& peer) const;  // in this epoch; null: not heard of
  bool waits_for(const Peer& peer) const;
  std::string awaited_of(std::size_t first, std::size_t last) const;
  std::string noticed_by(int rank, std::size_t peer) const;
  Clock::time_point first_deadline() const;
  void lose_silent_locked();
  void lose_locked(int peer, Loss loss, const std::string& why);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  std::vector<std::unique_ptr<Slot>> slots_;
  Spares spares_;
  std::uint32_t epoch_ = 0, oldest_ = 0;  // messages before `oldest_` are dropped
  Place place_, before_;
  std::uint64_t version_ = 0;
  std::uint64_t bytes_received_ = 0;
  std::size_t longest_ = 0;  // message since the last `trim`
  bool expects_all_ = false;
  Clock::duration timeout_ = Clock::duration::max();
  std::string title_;
  std::vector<int> names_;
};

/// A rank as a place in a vector.
constexpr std::size_t at(int rank) {
  return static_cast<std::size_t>(rank);
}

/// Writes the head of a frame of kFrameHead bytes; `same`: as far as its sender knows, all ranks
/// are at this place.
enum class Places : std::uint8_t { same, differ };
void write_frame_head(std::uint32_t epoch, const Place& place, Places known, std::byte* out);
/// Appends a number in groups of seven bits, the lowest first.
void append_varint(Bytes& out, std::uint64_t number);
/// Reads one and moves on; false if the bytes end first.
bool read_varint(std::span<const std::byte>& bytes, std::uint64_t& number);

}  // namespace topreduce::comm
