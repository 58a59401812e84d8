#include "topreduce/comm/mailbox.h"

#include <algorithm>
#include <cassert>

#include "topreduce/errors.h"
#include "topreduce/wire/checksum.h"
#include "topreduce/wire/little_endian.h"

namespace topreduce::comm {
namespace {

using wire::load;
using wire::store;

constexpr std::uint16_t kMagic = 0x5054;  // "TP"
constexpr std::uint8_t kVersion = 5;
constexpr std::uint8_t kLastKind = static_cast<std::uint8_t>(Place::Kind::rebuild);
constexpr std::uint8_t kDiffer = 0x80;    // beside the kind
constexpr std::size_t kLeastRoom = 4096;  // bytes: short messages of any length share their memory

constexpr std::size_t kMostVarint = 9;                     // bytes
constexpr std::size_t kCheckAt = Mailbox::kFrameHead - 2;  // in the head of a frame
constexpr auto kNever = Mailbox::Clock::time_point::max();

enum class Head { whole, cut, bad };

// Reads a number and moves on.
Head read_number(std::span<const std::byte>& bytes, std::uint64_t& number) {
  number = 0;
  for (std::size_t i = 0; i < kMostVarint; ++i) {
    if (i == bytes.size()) return Head::cut;
    number |= static_cast<std::uint64_t>(bytes[i] & std::byte{0x7f}) << 7 * i;
    if ((bytes[i] & std::byte{0x80}) == std::byte{0}) {
      bytes = bytes.subspan(i + 1);
      return Head::whole;
    }
  }
  return Head::bad;
}

// Reads the head of a message, and moves on if it is whole.
Head read_head(std::span<const std::byte>& bytes, Tag& tag, std::size_t& length) {
  std::array<std::uint64_t, 3> numbers;
  auto rest = bytes;
  for (std::uint64_t& number : numbers) {
    if (const Head head = read_number(rest, number); head != Head::whole) return head;
  }
  if ((numbers[0] | numbers[1]) >> 32 != 0) return Head::bad;
  tag = {static_cast<std::uint32_t>(numbers[0]), static_cast<std::uint32_t>(numbers[1])};
  length = static_cast<std::size_t>(numbers[2]);
  bytes = rest;
  return Head::whole;
}

// Of the head of a frame: a bit that changed on its way must not pass for another place.
std::uint16_t check_of(const std::byte* head) {
  return static_cast<std::uint16_t>(wire::xxh64({head, kCheckAt}, 0));
}

std::string in_milliseconds(Mailbox::Clock::duration time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(time).count()) +
         " ms";
}

}  // namespace

std::string to_string(const Place& place) {
  const std::string step = std::to_string(place.step);
  switch (place.kind) {
    case Place::Kind::start: return "before its first call";
    case Place::Kind::attach: return "attach()";
    case Place::Kind::agree:
      return "the first step after settings or a state changed, step " + step;
    case Place::Kind::configure: return "configure() before step " + step;
    case Place::Kind::bypass: return "bypass() before step " + step;
    case Place::Kind::compress: return "compress() before step " + step;
    case Place::Kind::load: return "load()";
    case Place::Kind::rebuild: return "rebuild()";
    case Place::Kind::step:
    case Place::Kind::order:  // its very beginning
      return "step " + step;
  }
  return "an unknown call";
}

Phase phase_of(const Place& place, const Tag& tag) {
  if (tag.exchange == kVote) return Phase::vote;
  if (tag.exchange != kCollective) return Phase::exchange;
  return place.kind == Place::Kind::step ? Phase::exchange : Phase::agreement;
}

std::string to_string(const Place& place, const Tag& tag) {
  const std::string text = to_string(place);
  if (tag.exchange == kVote) return text + ", the vote";
  if (tag.exchange == kNative) return text + ", an exchange by the transport's all-reduce";
  if (tag.exchange != kCollective) {
    return text + ", bucket of parameter " + std::to_string(tag.exchange);
  }
  switch (place.kind) {
    case Place::Kind::agree: return text + ", the agreement";
    case Place::Kind::order: return text + ", the order of buckets";
    default: return text;
  }
}

void append_varint(Bytes& out, std::uint64_t number) {
  for (; number >= 0x80; number >>= 7) out.push_back(static_cast<std::byte>(number | 0x80));
  out.push_back(static_cast<std::byte>(number));
}

bool read_varint(std::span<const std::byte>& bytes, std::uint64_t& number) {
  return read_number(bytes, number) == Head::whole;
}

void write_frame_head(std::uint32_t epoch, const Place& place, Places known, std::byte* out) {
  const std::uint8_t flag = known == Places::differ ? kDiffer : 0;
  store(out, kMagic);
  store(out + 2, kVersion);
  store(out + 3, static_cast<std::uint8_t>(static_cast<std::uint8_t>(place.kind) | flag));
  store(out + 4, place.step);
  store(out + 12, epoch);
  store(out + kCheckAt, check_of(out));
}

Mailbox::Mailbox(int ranks) : peers_(at(ranks)) {}

// ---- whoever receives --------------------------------------------------------------------------

void Mailbox::accept(int peer, std::span<const std::byte> frame) {
  accept(peer, frame, nullptr);
}

void Mailbox::accept(int peer, Bytes& frame) {
  accept(peer, frame, &frame);
}

// `buffer`, unless null, holds the frame and may be kept.
void Mailbox::accept(int peer, std::span<const std::byte> frame, Bytes* buffer) {
  const std::lock_guard lock(mutex_);
  Peer& from = peers_[at(peer)];
  if (from.lost) return;
  ++version_;
  from.since = Clock::now();
  changed_.notify_all();
  if (!frame.empty() && frame[0] == kShortHead && from.heard) {
    count_received(from, frame.size() - 1);  // how many frames there are is chance
    return read(peer, frame.subspan(1), buffer);
  }
  if (frame.size() < kFrameHead || load<std::uint16_t>(frame.data()) != kMagic) {
    return lose_locked(peer, Loss::damaged, "a frame that is none of topreduce's");
  }
  const auto version = load<std::uint8_t>(frame.data() + 2);
  const auto flagged = load<std::uint8_t>(frame.data() + 3);
  const auto kind = static_cast<std::uint8_t>(flagged & ~kDiffer);
  if (version != kVersion) {
    return lose_locked(peer, Loss::damaged,
                       "a frame of version " + std::to_string(version) + ", this is version " +
                           std::to_string(kVersion));
  }
  if (load<std::uint16_t>(frame.data() + kCheckAt) != check_of(frame.data())) {
    return lose_locked(peer, Loss::damaged, "a frame whose head was damaged on its way");
  }
  if (kind > kLastKind) {
    return lose_locked(peer, Loss::damaged, "a frame of an unknown place");
  }
  const auto epoch = load<std::uint32_t>(frame.data() + 12);
  if (epoch < from.epoch || ((from.in_message || from.head_bytes > 0) && epoch != from.epoch)) {
    return lose_locked(peer, Loss::damaged, "a frame out of order");
  }
  from.epoch = epoch;
  from.heard = true;
  const Place place{static_cast<Place::Kind>(kind), load<std::uint64_t>(frame.data() + 4)};
  if (epoch >= oldest_) {
    if (from.places.empty() || from.places.back().epoch != epoch) {
      from.places.push_back({epoch, place});
    }
    from.places.back().differs |= flagged != kind;
  }
  count_received(from, frame.size());
  read(peer, frame.subspan(kFrameHead), buffer);
}

void Mailbox::count_received(Peer& from, std::size_t bytes) {
  bytes_received_ += bytes;
  if (!from.places.empty()) from.places.back().bytes += bytes;
}

void Mailbox::read(int peer, std::span<const std::byte> stream, Bytes* buffer) {
  Peer& from = peers_[at(peer)];
  while (!stream.empty()) {
    if (!from.in_message) {
      // Frames end anywhere, in the middle of a head too: its start was kept.
      const std::size_t kept = from.head_bytes, more = std::min(stream.size(), kMostHead - kept);
      std::ranges::copy(stream.first(more), from.head.begin() + static_cast<std::ptrdiff_t>(kept));
      std::span<const std::byte> rest(from.head.data(), kept + more);
      const Head head = read_head(rest, from.tag, from.missing);
      if (head == Head::bad) {
        return lose_locked(peer, Loss::damaged, "a message without a head");
      }
      if (head == Head::cut) {
        from.head_bytes = kept + more;
        return;
      }
      stream = stream.subspan(more - rest.size());
      from.head_bytes = 0;
      from.in_message = true;
      from.target = nullptr;
      if (from.epoch >= oldest_) {
        Message& message = find_or_make(from.epoch, from.tag).messages[at(peer)];
        if (message.here) return lose_locked(peer, Loss::damaged, "the same message twice");
        from.target = &message;
        if (buffer != nullptr && from.missing == stream.size() && from.missing >= kLeastRoom) {
          message.start = buffer->size() - stream.size();
          message.bytes = std::exchange(*buffer, spares_.take(buffer->size()));
          from.missing = 0;
          return finish_message(peer);
        }
        // Not more than what came so far: a length is only a claim.
        message.bytes = spares_.take(std::max(kLeastRoom, std::min(from.missing, stream.size())));
      }
    }
    const std::size_t count = std::min(from.missing, stream.size());
    if (from.target != nullptr) append(from.target->bytes, stream.first(count));
    stream = stream.subspan(count);
    from.missing -= count;
    if (from.missing == 0) finish_message(peer);
  }
}

void Mailbox::finish_message(int peer) {
  Peer& from = peers_[at(peer)];
  from.in_message = false;
  if (from.target == nullptr) return;
  longest_ = std::max(longest_, from.target->bytes.size());
  from.target->here = true;
  if (std::exchange(from.target->expected, false)) --from.expected;
  // What nobody asked for, its tag damaged perhaps, does not stand for what was.
  if (from.target->asked) ++find(from.epoch, from.tag)->count;
}

void Mailbox::lose(int peer, Loss loss, const std::string& why) {
  const std::lock_guard lock(mutex_);
  lose_locked(peer, loss, why);
}

void Mailbox::lose_locked(int peer, Loss loss, const std::string& why) {
  Peer& from = peers_[at(peer)];
  if (from.lost) return;
  from.lost = true;
  from.loss = loss;
  from.why = why;
  ++version_;
  changed_.notify_all();
}

std::vector<int> Mailbox::awaited() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    if (waits_for(peers_[r]) && !peers_[r].lost) ranks.push_back(static_cast<int>(r));
  }
  return ranks;
}

void Mailbox::set_timeout(Clock::duration timeout) {
  const std::lock_guard lock(mutex_);
  timeout_ = timeout;
}

void Mailbox::start_waiting() {
  const std::lock_guard lock(mutex_);
  if (timeout_ == Clock::duration::max()) return;
  const auto now = Clock::now();
  for (Peer& peer : peers_) peer.since = now;
}

void Mailbox::lose_silent() {
  const std::lock_guard lock(mutex_);
  lose_silent_locked();
}

// When the next peer has been silent for too long.
Mailbox::Clock::time_point Mailbox::first_deadline() const {
  auto first = kNever;
  if (timeout_ == Clock::duration::max()) return first;
  for (const Peer& peer : peers_) {
    if (waits_for(peer) && !peer.lost) first = std::min(first, peer.since + timeout_);
  }
  return first;
}

void Mailbox::lose_silent_locked() {
  if (timeout_ == Clock::duration::max()) return;
  const auto now = Clock::now();
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    const Peer& peer = peers_[r];
    if (!waits_for(peer) || peer.lost || now - peer.since < timeout_) continue;
    lose_locked(static_cast<int>(r), Loss::gone,
                "is silent: nothing came of it for " + in_milliseconds(timeout_) +
                    "; it may have died or stopped, or be busy for longer than the time-out");
  }
}

bool Mailbox::waits_for(const Peer& peer) const {
  return peer.expected > 0 || (expects_all_ && peer.epoch < epoch_);
}

void Mailbox::set_names(std::string title, std::vector<int> names) {
  const std::lock_guard lock(mutex_);
  title_ = std::move(title);
  names_ = std::move(names);
}

std::string Mailbox::title(int rank) const {
  return title_.empty() ? "rank " + name(rank) : title_;
}

std::string Mailbox::name(int rank) const {
  return std::to_string(names_.empty() ? rank : names_[at(rank)]);
}

std::string Mailbox::whereabouts() const {
  const std::lock_guard lock(mutex_);
  return awaited_of(0, peers_.size());
}

// The place, and what is awaited there of peers from `first` to before `last`.
std::string Mailbox::awaited_of(std::size_t first, std::size_t last) const {
  for (const auto& slot : slots_) {
    if (!slot->used || slot->epoch != epoch_) continue;
    for (std::size_t r = first; r < last; ++r) {
      if (slot->messages[r].expected) return to_string(place_, slot->tag);
    }
  }
  return to_string(place_);
}

// ---- the rank itself ---------------------------------------------------------------------------

void Mailbox::enter(const Place& place) {
  const std::lock_guard lock(mutex_);
  before_ = std::exchange(place_, place);
  expects_all_ = false;
  drop_before(epoch_);
  ++epoch_;
  expect_nothing();
}

void Mailbox::stay() {
  const std::lock_guard lock(mutex_);
  drop_before(epoch_);
}

void Mailbox::leave() {
  const std::lock_guard lock(mutex_);
  assert(oldest_ < epoch_);
  place_ = before_;
  --epoch_;
  expect_nothing();
}

void Mailbox::drop_before(std::uint32_t epoch) {
  oldest_ = epoch;
  for (Peer& peer : peers_) {
    if (peer.in_message && peer.epoch < epoch) peer.target = nullptr;  // the rest of it is dropped
    std::erase_if(peer.places, [&](const auto& heard) { return heard.epoch < epoch; });
  }
  for (const auto& slot : slots_) {
    if (slot->used && slot->epoch < epoch) drop(*slot);
  }
}

void Mailbox::expect_nothing() {
  for (Peer& peer : peers_) peer.expected = 0;
  for (const auto& slot : slots_) {
    for (Message& message : slot->messages) message.expected = false;
  }
}

void Mailbox::expect(const Tag& tag, int peer) {
  const std::lock_guard lock(mutex_);
  Slot& slot = find_or_make(epoch_, tag);
  Message& message = slot.messages[at(peer)];
  if (!std::exchange(message.asked, true) && message.here) ++slot.count;
  if (message.here || message.expected) return;
  message.expected = true;
  if (peers_[at(peer)].expected++ == 0) peers_[at(peer)].since = Clock::now();
}

std::size_t Mailbox::arrived(const Tag& tag) const {
  const std::lock_guard lock(mutex_);
  const Slot* slot = find(epoch_, tag);
  return slot == nullptr ? 0 : slot->count;
}

std::span<const std::byte> Mailbox::message(const Tag& tag, int peer) const {
  const std::lock_guard lock(mutex_);
  const Slot* slot = find(epoch_, tag);
  assert(slot != nullptr && slot->messages[at(peer)].here);
  const Message& message = slot->messages[at(peer)];
  return std::span(message.bytes).subspan(message.start);
}

void Mailbox::release(const Tag& tag) {
  const std::lock_guard lock(mutex_);
  if (Slot* slot = find(epoch_, tag)) drop(*slot);
}

std::uint64_t Mailbox::version() const {
  const std::lock_guard lock(mutex_);
  return version_;
}

void Mailbox::wait(std::uint64_t known) {
  std::unique_lock lock(mutex_);
  while (version_ == known) {
    const auto deadline = first_deadline();
    if (deadline == kNever) {
      changed_.wait(lock);
    } else if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) {
      lose_silent_locked();
    }
  }
}

std::string Mailbox::noticed_by(int rank, std::size_t peer) const {
  return "; noticed by " + title(rank) + ", " + awaited_of(peer, peer + 1);
}

void Mailbox::check(int rank) const {
  const std::lock_guard lock(mutex_);
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    const Peer& peer = peers_[r];
    if (r == at(rank) || !peer.lost || !waits_for(peer)) continue;
    const std::string culprit = "rank " + name(static_cast<int>(r)) + " ";
    const std::string notice = noticed_by(rank, r);
    if (peer.loss == Loss::damaged) throw WireError(culprit + "sent " + peer.why + notice);
    throw CommError(culprit + peer.why + notice);
  }
}

// Frames keep their order: what is missing of an epoch that its sender has left never comes.
void Mailbox::check_left(int rank) const {
  const std::lock_guard lock(mutex_);
  for (std::size_t r = 0; r < peers_.size() && !expects_all_; ++r) {
    const Peer& peer = peers_[r];
    if (r == at(rank) || peer.expected == 0 || peer.epoch <= epoch_) continue;
    throw WireError("rank " + name(static_cast<int>(r)) + " has gone on to " +
                    to_string(peer.places.back().place) + noticed_by(rank, r));
  }
}

void Mailbox::expect_all() {
  const std::lock_guard lock(mutex_);
  expects_all_ = true;
  for (Peer& peer : peers_) peer.since = Clock::now();
}

bool Mailbox::differs() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(peers_, [&](const Peer& peer) {
    const PeerPlace* heard = place_of(peer);
    return heard != nullptr && (heard->differs || heard->place != place_);
  });
}

const Mailbox::PeerPlace* Mailbox::place_of(const Peer& peer) const {
  const auto found = std::ranges::find(peer.places, epoch_, &PeerPlace::epoch);
  return found == peer.places.end() ? nullptr : &*found;
}

bool Mailbox::heard_all(int rank) const {
  const std::lock_guard lock(mutex_);
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    const Peer& peer = peers_[r];
    if (r != at(rank) && !(peer.heard && peer.epoch >= epoch_) && !peer.lost) return false;
  }
  return true;
}

std::string Mailbox::places(int rank) const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    const PeerPlace* heard = place_of(peers_[r]);
    const Place* place = r == at(rank) ? &place_ : heard == nullptr ? nullptr : &heard->place;
    text += (r > 0 ? "; rank " : "rank ") + name(static_cast<int>(r)) + ": " +
            (place != nullptr ? to_string(*place) : "not heard of");
  }
  return text;
}

std::uint64_t Mailbox::bytes_received_here() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t bytes = 0;
  for (const Peer& peer : peers_) {
    if (const PeerPlace* heard = place_of(peer)) bytes += heard->bytes;
  }
  return bytes;
}

std::uint64_t Mailbox::bytes_received() const {
  const std::lock_guard lock(mutex_);
  return bytes_received_;
}

void Mailbox::trim() {
  const std::lock_guard lock(mutex_);
  for (const auto& slot : slots_) {
    if (slot->used) continue;
    for (Message& message : slot->messages) {
      if (is_far_larger(message.bytes, longest_)) Bytes().swap(message.bytes);
    }
  }
  spares_.trim(longest_);
  longest_ = 0;
}

Mailbox::Slot* Mailbox::find(std::uint32_t epoch, const Tag& tag) const {
  for (const auto& slot : slots_) {
    if (slot->used && slot->tag == tag && slot->epoch == epoch) return slot.get();
  }
  return nullptr;
}

Mailbox::Slot& Mailbox::find_or_make(std::uint32_t epoch, const Tag& tag) {
  if (Slot* slot = find(epoch, tag)) return *slot;
  const auto spare = std::ranges::find_if(slots_, [](const auto& slot) { return !slot->used; });
  const bool none = spare == slots_.end();
  if (none) {
    auto made = std::make_unique<Slot>();
    made->messages.resize(peers_.size());
    slots_.push_back(std::move(made));
  }
  Slot& slot = none ? *slots_.back() : **spare;
  slot.used = true;
  slot.epoch = epoch;
  slot.tag = tag;
  return slot;
}

void Mailbox::drop(Slot& slot) {
  slot.used = false;
  slot.count = 0;
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    Message& message = slot.messages[r];
    Peer& peer = peers_[r];
    message.here = message.asked = false;
    message.start = 0;
    spares_.give(std::move(message.bytes));
    if (std::exchange(message.expected, false)) --peer.expected;
    if (peer.in_message && peer.target == &message) peer.target = nullptr;
  }
}

}  // namespace topreduce::comm
