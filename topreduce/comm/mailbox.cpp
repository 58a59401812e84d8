#include "topreduce/comm/mailbox.h"

#include <algorithm>
#include <cassert>

#include "topreduce/errors.h"
#include "topreduce/wire/little_endian.h"

namespace topreduce::comm {
namespace {

using wire::load;
using wire::store;

constexpr std::uint16_t kMagic = 0x5054;  // "TP"
constexpr std::uint8_t kVersion = 4;
constexpr std::uint8_t kLastKind = static_cast<std::uint8_t>(Place::Kind::step);
constexpr std::size_t kLeastRoom = 4096;  // bytes: short messages of any length share their memory

constexpr std::size_t kMostVarint = 9;  // bytes

enum class Head { whole, cut, bad };

// Reads a number and moves on.
Head read_varint(std::span<const std::byte>& bytes, std::uint64_t& number) {
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
    if (const Head head = read_varint(rest, number); head != Head::whole) return head;
  }
  if ((numbers[0] | numbers[1]) >> 32 != 0) return Head::bad;
  tag = {static_cast<std::uint32_t>(numbers[0]), static_cast<std::uint32_t>(numbers[1])};
  length = static_cast<std::size_t>(numbers[2]);
  bytes = rest;
  return Head::whole;
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
    case Place::Kind::resume: return "resume() before step " + step;
    case Place::Kind::step: return "step " + step;
  }
  return "an unknown call";
}

void append_varint(Bytes& out, std::uint64_t number) {
  for (; number >= 0x80; number >>= 7) out.push_back(static_cast<std::byte>(number | 0x80));
  out.push_back(static_cast<std::byte>(number));
}

void write_frame_head(std::uint32_t epoch, const Place& place, std::byte* out) {
  store(out, epoch);
  store(out + 4, kMagic);
  store(out + 6, kVersion);
  store(out + 7, static_cast<std::uint8_t>(place.kind));
  store(out + 8, place.step);
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
  bytes_received_ += frame.size();
  ++version_;
  changed_.notify_all();
  if (frame.size() < kFrameHead || load<std::uint16_t>(frame.data() + 4) != kMagic) {
    return lose_locked(peer, Loss::damaged, "a frame that is none of topreduce's");
  }
  const auto version = load<std::uint8_t>(frame.data() + 6),
             kind = load<std::uint8_t>(frame.data() + 7);
  if (version != kVersion || kind > kLastKind) {
    return lose_locked(peer, Loss::damaged,
                       "a frame of version " + std::to_string(version) + ", this is version " +
                           std::to_string(kVersion));
  }
  const auto epoch = load<std::uint32_t>(frame.data());
  if (epoch < from.epoch || ((from.open || from.cut > 0) && epoch != from.epoch)) {
    return lose_locked(peer, Loss::damaged, "a frame out of order");
  }
  from.epoch = epoch;
  const Place place{static_cast<Place::Kind>(kind), load<std::uint64_t>(frame.data() + 8)};
  if (epoch >= oldest_ && (from.places.empty() || from.places.back().first != epoch)) {
    from.places.emplace_back(epoch, place);
  }
  read(peer, frame.subspan(kFrameHead), buffer);
}

void Mailbox::read(int peer, std::span<const std::byte> stream, Bytes* buffer) {
  Peer& from = peers_[at(peer)];
  while (!stream.empty()) {
    if (!from.open) {
      // Frames end anywhere, in the middle of a head too: its start was kept.
      const std::size_t kept = from.cut, more = std::min(stream.size(), kMostHead - kept);
      std::ranges::copy(stream.first(more), from.head.begin() + static_cast<std::ptrdiff_t>(kept));
      std::span<const std::byte> rest(from.head.data(), kept + more);
      const Head head = read_head(rest, from.tag, from.missing);
      if (head == Head::bad) {
        return lose_locked(peer, Loss::damaged, "a message without a head");
      }
      if (head == Head::cut) {
        from.cut = kept + more;
        return;
      }
      stream = stream.subspan(more - rest.size());
      from.cut = 0;
      from.open = true;
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
  from.open = false;
  if (from.target == nullptr) return;
  from.target->here = true;
  if (std::exchange(from.target->expected, false)) --from.expected;
  ++find(from.epoch, from.tag)->count;
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
  wanted_.notify_all();
}

int Mailbox::next_expected(int last) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (closed_) return -1;
    const int ranks = static_cast<int>(peers_.size());
    for (int i = 1; i <= ranks; ++i) {
      const int peer = (last + i) % ranks;
      if (peers_[at(peer)].expected > 0 && !peers_[at(peer)].lost) return peer;
    }
    wanted_.wait(lock);
  }
}

void Mailbox::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  ++version_;
  wanted_.notify_all();
  changed_.notify_all();
}

// ---- the rank itself ---------------------------------------------------------------------------

void Mailbox::enter(const Place& place) {
  const std::lock_guard lock(mutex_);
  before_ = std::exchange(place_, place);
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
    if (peer.open && peer.epoch < epoch) peer.target = nullptr;  // the rest of it is dropped
    std::erase_if(peer.places, [&](const auto& heard) { return heard.first < epoch; });
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
  Message& message = find_or_make(epoch_, tag).messages[at(peer)];
  if (message.here || message.expected) return;
  message.expected = true;
  if (peers_[at(peer)].expected++ == 0) wanted_.notify_all();
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

void Mailbox::wait(std::uint64_t seen) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return version_ != seen; });
}

void Mailbox::check(int rank) const {
  const std::lock_guard lock(mutex_);
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    const Peer& peer = peers_[r];
    if (!peer.lost || peer.expected == 0) continue;
    const std::string text = "rank " + std::to_string(rank) + ", " + to_string(place_) +
                             ": from rank " + std::to_string(r) + ": " + peer.why;
    if (peer.loss == Loss::damaged) throw WireError(text);
    throw CommError(text);
  }
}

bool Mailbox::differs() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(peers_, [&](const Peer& peer) {
    const Place* place = place_of(peer);
    return place != nullptr && *place != place_;
  });
}

const Place* Mailbox::place_of(const Peer& peer) const {
  for (const auto& [epoch, place] : peer.places) {
    if (epoch == epoch_) return &place;
  }
  return nullptr;
}

bool Mailbox::heard_all(int rank) const {
  const std::lock_guard lock(mutex_);
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    if (r != at(rank) && peers_[r].epoch < epoch_ && !peers_[r].lost) return false;
  }
  return true;
}

std::string Mailbox::places(int rank) const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    const Place* place = r == at(rank) ? &place_ : place_of(peers_[r]);
    text += (r > 0 ? "; rank " : "rank ") + std::to_string(r) + ": " +
            (place != nullptr ? to_string(*place) : "not heard of");
  }
  return text;
}

std::uint64_t Mailbox::bytes_received() const {
  const std::lock_guard lock(mutex_);
  return bytes_received_;
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
    message.here = false;
    message.start = 0;
    spares_.give(std::move(message.bytes));
    if (std::exchange(message.expected, false)) --peer.expected;
    if (peer.open && peer.target == &message) peer.target = nullptr;
  }
}

}  // namespace topreduce::comm
