// Any bytes as frames of a peer, cut anywhere, give messages or an error. The first byte of the
// input chooses who receives them: a plain reader beside the mailbox, whom it must equal; a rank
// that goes its way meanwhile; or one that waits in a collective.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/fuzz/input.h"
#include "topreduce/comm/communicator.h"

namespace topreduce::comm {
namespace {

constexpr int kMe = 0, kPeer = 1;
constexpr Place kHere{Place::Kind::step, 7};

Bytes frame_of(std::uint32_t epoch, const Place& place, std::span<const std::byte> stream) {
  Bytes frame(Mailbox::kFrameHead);
  write_frame_head(epoch, place, Places::same, frame.data());
  append(frame, stream);
  return frame;
}

/// Hands a frame over in memory of just its size, so that the sanitizer sees a reader that runs
/// over its end: to be copied, or to be kept.
void accept(Mailbox& mailbox, const Bytes& frame, bool may_keep) {
  Bytes exact;
  exact.reserve(frame.size());
  exact.assign(frame.begin(), frame.end());
  if (may_keep) return mailbox.accept(kPeer, exact);
  mailbox.accept(kPeer, std::span<const std::byte>(exact));
}

/// Whether the peer counts as lost for who waits for it.
bool is_lost(Mailbox& mailbox) {
  constexpr Tag kNever{0xfffffff0, 0xfffffff0};
  mailbox.expect(kNever, kPeer);
  try {
    mailbox.check(kMe);
  } catch (const WireError&) {
    return true;
  }
  mailbox.release(kNever);
  return false;
}

// ---- a stream, cut anywhere --------------------------------------------------------------------

using Key = std::pair<std::uint32_t, std::uint32_t>;

/// What a stream holds; `good` is false from where it cannot be read.
struct Plain {
  std::map<Key, std::span<const std::byte>> messages;
  bool good = true;
};

/// None if the stream ends before, or if it takes more than 9 bytes.
std::optional<std::uint64_t> number_in(std::span<const std::byte>& stream, bool& good) {
  std::uint64_t number = 0;
  for (std::size_t i = 0; i < stream.size(); ++i) {
    if (i == 9) break;
    number |= (std::to_integer<std::uint64_t>(stream[i]) & 0x7f) << 7 * i;
    if (std::to_integer<unsigned>(stream[i]) >= 0x80) continue;
    stream = stream.subspan(i + 1);
    return number;
  }
  good = stream.size() < 9;
  return {};
}

Plain read_plainly(std::span<const std::byte> stream) {
  Plain plain;
  while (!stream.empty()) {
    std::array<std::uint64_t, 3> head;
    for (std::uint64_t& number : head) {
      const auto read = number_in(stream, plain.good);
      if (!read) return plain;
      number = *read;
    }
    const Key key(static_cast<std::uint32_t>(head[0]), static_cast<std::uint32_t>(head[1]));
    plain.good = key.first == head[0] && key.second == head[1] && !plain.messages.contains(key);
    if (!plain.good || head[2] > stream.size()) return plain;
    plain.messages[key] = stream.first(head[2]);
    stream = stream.subspan(head[2]);
  }
  return plain;
}

void fuzz_cuts(Input input) {
  Mailbox mailbox(2);
  mailbox.enter(kHere);
  Bytes stream;
  for (bool first = true; !input.empty();) {
    const unsigned choice = input.byte();
    const auto part = input.take(choice < 250 ? choice : 6000);
    append(stream, part);
    Bytes frame = frame_of(1, kHere, part);
    if (!first && choice % 2 == 0) {
      frame.assign(1, Mailbox::kShortHead);
      append(frame, part);
    }
    first = false;
    accept(mailbox, frame, choice % 3 == 0);
  }
  const Plain plain = read_plainly(stream);
  for (const auto& [key, bytes] : plain.messages) {
    const Tag tag{key.first, key.second};
    mailbox.expect(tag, kPeer);
    require(mailbox.arrived(tag) == 1);
    require(std::ranges::equal(mailbox.message(tag, kPeer), bytes));
  }
  require(is_lost(mailbox) == !plain.good);
}

// ---- any frames, to a rank that goes its way ---------------------------------------------------

/// Frames that are right so far, or anything.
Bytes next_frame(Input& input) {
  const unsigned kind = input.byte(), more = input.byte();
  const auto bytes = input.take(input.byte());
  const Place place{static_cast<Place::Kind>(more % 8), more / 64};
  if (kind % 4 == 0) return frame_of(more / 8 % 8, place, bytes);
  if (kind % 4 == 1) return frame_of(more / 8 % 8, kHere, bytes);
  Bytes frame;
  if (kind % 4 == 2) frame.push_back(Mailbox::kShortHead);
  append(frame, bytes);
  return frame;
}

/// What a rank asks before it waits.
void check(const Mailbox& mailbox) {
  try {
    mailbox.differs();
    mailbox.heard_all(kMe);
    mailbox.places(kMe);
    mailbox.check(kMe);
    mailbox.check_left(kMe);
  } catch (const WireError&) {
  } catch (const CommError&) {
  }
}

void fuzz_calls(Input input) {
  Mailbox mailbox(3);
  bool may_leave = false;
  std::size_t accepted = 0;
  while (!input.empty()) {
    const unsigned call = input.byte();
    const Tag tag{call / 16 % 4, call / 64};
    switch (call % 16) {
      case 0: mailbox.enter(kHere), may_leave = true; break;
      case 1: mailbox.stay(), may_leave = false; break;
      case 2:
        if (std::exchange(may_leave, false)) mailbox.leave();
        break;
      case 3: mailbox.expect(tag, kPeer); break;
      case 4: mailbox.release(tag); break;
      case 5: mailbox.trim(); break;
      case 6: mailbox.expect_all(); break;
      case 7:
        if (call >= 240) mailbox.lose(kPeer, Loss::gone, "has left");
        break;
      default: {
        const Bytes frame = next_frame(input);
        accepted += frame.size();
        accept(mailbox, frame, call % 2 == 0);
      }
    }
    check(mailbox);
    require(mailbox.bytes_received() <= accepted);
    if (mailbox.arrived(tag) > 0) require(mailbox.message(tag, kPeer).size() <= accepted);
  }
}

// ---- any frames, to a rank that waits ----------------------------------------------------------

/// Rank 0 of 2, whose peer sends the input and is gone at its end.
class Listener final : public Communicator {
 public:
  explicit Listener(Input& input) : Communicator(kMe, 2), input_(&input) {}

 protected:
  void send_frame(int, std::span<const std::byte>) override {}
  bool receive_frames() override {
    if (input_->empty()) {
      mailbox().lose(kPeer, Loss::gone, "has left");
    } else {
      accept(mailbox(), next_frame(*input_), true);
    }
    return true;
  }
  std::chrono::microseconds spin() const override { return std::chrono::hours(1); }

 private:
  Input* input_;
};

/// With the errors that a caller must be ready for.
template <class Call>
void attempt(Call&& call) {
  try {
    call();
  } catch (const WireError&) {
  } catch (const CommError&) {
  } catch (const std::invalid_argument&) {  // ranks at different places
  }
}

void fuzz_collectives(Input input) {
  constexpr int kPlaces = 4;
  Listener comm(input);
  std::array<float, 5> values{};
  const auto bytes = std::as_writable_bytes(std::span(values));
  Inbox inbox;
  for (int place = 0; place < kPlaces; ++place) {
    comm.enter(kHere);
    attempt([&] { comm.all_gather(bytes, inbox); });
    attempt([&] { comm.all_reduce(values); });
    attempt([&] { comm.broadcast(bytes, kPeer); });
  }
}

}  // namespace
}  // namespace topreduce::comm

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace topreduce::comm;
  topreduce::Input input(std::as_bytes(std::span(data, size)));
  switch (input.byte() % 3) {
    case 0: fuzz_cuts(input); break;
    case 1: fuzz_calls(input); break;
    case 2: fuzz_collectives(input); break;
  }
  return 0;
}
