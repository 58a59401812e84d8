// What one rank has received: frames in, messages out; early, late, damaged, or from a rank that is
// gone.

#include "topreduce/comm/mailbox.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "topreduce/errors.h"

namespace topreduce::comm {
namespace {

constexpr Place kHere{Place::Kind::step, 7};
constexpr int kMe = 0, kPeer = 1;

Bytes text(const std::string& words) {
  Bytes bytes;
  append(bytes, std::as_bytes(std::span(words)));
  return bytes;
}

Bytes message(const Tag& tag, const std::string& words) {
  Bytes stream;
  append_varint(stream, tag.exchange);
  append_varint(stream, tag.round);
  append_varint(stream, words.size());
  append(stream, text(words));
  return stream;
}

Bytes frame(std::uint32_t epoch, std::span<const std::byte> stream, const Place& place = kHere) {
  Bytes bytes(Mailbox::kFrameHead);
  write_frame_head(epoch, place, Places::same, bytes.data());
  append(bytes, stream);
  return bytes;
}

std::string words(const Mailbox& mailbox, const Tag& tag, int peer = kPeer) {
  const auto bytes = mailbox.message(tag, peer);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// How many messages with this tag are here, if those of one peer are asked for.
std::size_t arrived(Mailbox& mailbox, const Tag& tag, int peer = kPeer) {
  mailbox.expect(tag, peer);
  const std::size_t count = mailbox.arrived(tag);
  if (count == 0) mailbox.release(tag);  // and is asked for no longer
  return count;
}

/// What `check` throws, with the kind of error in front; empty if nothing.
std::string error_of(const Mailbox& mailbox) {
  try {
    mailbox.check(kMe);
  } catch (const WireError& error) {
    return std::string("wire: ") + error.what();
  } catch (const CommError& error) {
    return std::string("comm: ") + error.what();
  }
  return "";
}

// ---- frames ------------------------------------------------------------------------------------

// Written down a second time.
TEST(WireFrame, HasThisLayout) {
  constexpr Place kPlace{Place::Kind::configure, 0xb1b2b3b4b5b6b7b8};
  std::uint8_t head[] = {'T',  'P',  5,    3,  // magic, version, kind of the place
                         0xb8, 0xb7, 0xb6, 0xb5, 0xb4, 0xb3, 0xb2, 0xb1,  // step
                         0xd4, 0xd3, 0xd2, 0xd1,                          // epoch
                         0x0b, 0xa9};                                     // of all that
  std::array<std::byte, Mailbox::kFrameHead> written;
  write_frame_head(0xd1d2d3d4, kPlace, Places::same, written.data());
  EXPECT_TRUE(std::ranges::equal(std::as_bytes(std::span(head)), written));
  write_frame_head(0xd1d2d3d4, kPlace, Places::differ, written.data());
  head[3] |= 0x80;
  head[16] = 0x73, head[17] = 0x25;
  EXPECT_TRUE(std::ranges::equal(std::as_bytes(std::span(head)), written));

  const std::uint8_t stream[] = {5, 0xac, 2, 3, 'a', 'b', 'c'};  // exchange 5, round 300, 3 bytes
  EXPECT_TRUE(std::ranges::equal(std::as_bytes(std::span(stream)), message({5, 300}, "abc")));
}

// Damage does not pass for another place or another epoch.
TEST(WireFrame, EveryByteOfItsHeadCounts) {
  const Tag tag{0, 0};
  for (std::size_t i = 0; i < Mailbox::kFrameHead; ++i) {
    for (int flip = 1; flip < 256; ++flip) {
      Mailbox mailbox(2);
      mailbox.enter(kHere);
      mailbox.expect({0, 1}, kPeer);
      Bytes bytes = frame(1, message(tag, "x"));
      bytes[i] ^= static_cast<std::byte>(flip);
      mailbox.accept(kPeer, bytes);
      EXPECT_TRUE(error_of(mailbox).starts_with("wire: ") && arrived(mailbox, tag) == 0)
          << "byte " << i << " flip " << flip;
    }
  }
}

// ---- messages ----------------------------------------------------------------------------------

// A stream of short, empty and long messages, whose tags take one to five bytes.
TEST(Mailbox, FramesMayEndAnywhere) {
  const std::vector<std::pair<Tag, std::string>> sent = {
      {{0, 0}, "first"},
      {{1, 300}, ""},
      {{0xffffffff, 0xffffffff}, std::string(300, 'x')},
      {{70'000, 1}, "y"},
      {{2, 2}, std::string(10'000, 'z')},
      {{2, 3}, ""},
  };
  Bytes stream;
  for (const auto& [tag, bytes] : sent) append(stream, message(tag, bytes));
  for (std::size_t length = 1; length < 400; ++length) {
    for (const bool hands_over : {false, true}) {
      Mailbox mailbox(2);
      for (std::span<const std::byte> rest = stream; !rest.empty();) {
        const std::size_t count = std::min(length < 399 ? length : stream.size(), rest.size());
        Bytes next = frame(0, rest.first(count), {});
        if (hands_over) mailbox.accept(kPeer, next);
        if (!hands_over) mailbox.accept(kPeer, std::span<const std::byte>(next));
        rest = rest.subspan(count);
      }
      for (const auto& [tag, bytes] : sent) {
        ASSERT_EQ(arrived(mailbox, tag), 1u) << length;
        ASSERT_EQ(words(mailbox, tag), bytes) << length;
      }
    }
  }
}

TEST(Mailbox, ALongMessageIsNotCopied) {
  Mailbox mailbox(2);
  const Tag first{0, 0}, second{0, 1};
  Bytes stream = message(first, "short");
  append(stream, message(second, std::string(5000, 'a')));
  Bytes bytes = frame(0, stream, {});
  const std::byte* const memory = bytes.data();
  mailbox.accept(kPeer, bytes);
  EXPECT_EQ(words(mailbox, first), "short");
  EXPECT_EQ(words(mailbox, second), std::string(5000, 'a'));
  EXPECT_EQ(mailbox.message(second, kPeer).data(),
            memory + stream.size() + Mailbox::kFrameHead - 5000);
  mailbox.release(second);
  mailbox.accept(kPeer, frame(0, message(second, "again"), {}));
  EXPECT_EQ(words(mailbox, second), "again");
}

TEST(Mailbox, ReleasedMessagesAreGone) {
  Mailbox mailbox(3);
  const Tag tag{1, 2};
  mailbox.accept(1, frame(0, message(tag, "one"), {}));
  mailbox.accept(2, frame(0, message(tag, "two"), {}));
  EXPECT_EQ(arrived(mailbox, tag, 1), 1u);
  EXPECT_EQ(arrived(mailbox, tag, 2), 2u);
  EXPECT_EQ(words(mailbox, tag, 2), "two");
  mailbox.release(tag);
  EXPECT_EQ(arrived(mailbox, tag, 1), 0u);
  mailbox.accept(1, frame(0, message(tag, "another"), {}));
  EXPECT_EQ(arrived(mailbox, tag, 1), 1u);
  EXPECT_EQ(words(mailbox, tag, 1), "another");
}

// As one whose tag was damaged on its way may look.
TEST(Mailbox, WhatNobodyAskedForStandsForNothing) {
  Mailbox mailbox(3);
  const Tag tag{1, 2};
  mailbox.expect(tag, 1);
  mailbox.accept(2, frame(0, message(tag, "of another"), {}));
  EXPECT_EQ(mailbox.arrived(tag), 0u);
  mailbox.accept(1, frame(0, message(tag, "what is awaited"), {}));
  EXPECT_EQ(mailbox.arrived(tag), 1u);
  EXPECT_EQ(words(mailbox, tag, 1), "what is awaited");
}

// In the middle of a message too: the rest of it is passed over, and what follows is read.
TEST(Mailbox, ReleasingAMessageInPartsDropsTheRest) {
  Mailbox mailbox(2);
  const Tag tag{1, 0}, next{1, 1};
  const Bytes stream = message(tag, "too long");
  mailbox.expect(tag, kPeer);
  mailbox.accept(kPeer, frame(0, std::span(stream).first(6), {}));
  mailbox.release(tag);
  Bytes rest;
  append(rest, std::span(stream).subspan(6));
  append(rest, message(next, "next"));
  mailbox.accept(kPeer, frame(0, rest, {}));
  EXPECT_EQ(arrived(mailbox, tag), 0u);
  EXPECT_EQ(words(mailbox, next), "next");
  mailbox.lose(kPeer, Loss::gone, "left");
  EXPECT_EQ(error_of(mailbox), "");
}

// ---- places ------------------------------------------------------------------------------------

TEST(Mailbox, EarlyMessagesWait) {
  Mailbox mailbox(2);
  const Tag tag{0, 0};
  mailbox.accept(kPeer, frame(1, message(tag, "one")));
  mailbox.accept(kPeer, frame(2, message(tag, "two")));
  EXPECT_EQ(arrived(mailbox, tag), 0u);
  mailbox.enter(kHere);
  EXPECT_EQ(words(mailbox, tag), "one");
  mailbox.enter(kHere);
  EXPECT_EQ(words(mailbox, tag), "two");
  mailbox.enter(kHere);
  EXPECT_EQ(arrived(mailbox, tag), 0u);
  EXPECT_FALSE(mailbox.differs());
}

TEST(Mailbox, WhatWasLeftForGoodIsDropped) {
  Mailbox mailbox(2);
  const Tag tag{0, 0}, cut{0, 1};
  const Bytes stream = message(cut, "in two frames");
  mailbox.accept(kPeer, frame(0, message(tag, "old"), {}));
  mailbox.accept(kPeer, frame(0, std::span(stream).first(8), {}));
  mailbox.enter(kHere);
  mailbox.stay();
  mailbox.accept(kPeer, frame(0, std::span(stream).subspan(8), {}));
  mailbox.accept(kPeer, frame(0, message({0, 2}, "late"), {}));
  mailbox.accept(kPeer, frame(1, message(tag, "new")));
  EXPECT_EQ(arrived(mailbox, cut) + arrived(mailbox, {0, 2}), 0u);
  EXPECT_EQ(words(mailbox, tag), "new");
  mailbox.expect({0, 3}, kPeer);
  EXPECT_EQ(error_of(mailbox), "");
}

TEST(Mailbox, LeavingFindsEverythingAsItWas) {
  Mailbox mailbox(2);
  const Tag tag{0, 0}, late{0, 1};
  mailbox.accept(kPeer, frame(0, message(tag, "kept"), {}));
  mailbox.enter(kHere);
  mailbox.expect(tag, kPeer);
  mailbox.accept(kPeer, frame(0, message(late, "came meanwhile"), {}));
  EXPECT_EQ(mailbox.arrived(tag), 0u);
  mailbox.leave();
  EXPECT_EQ(mailbox.epoch(), 0u);
  EXPECT_EQ(mailbox.place(), Place{});
  EXPECT_EQ(words(mailbox, tag), "kept");
  EXPECT_EQ(words(mailbox, late), "came meanwhile");
  mailbox.lose(kPeer, Loss::gone, "left");
  EXPECT_EQ(error_of(mailbox), "") << "nothing is expected any more";
}

TEST(Mailbox, PlacesAreComparedByEpoch) {
  Mailbox mailbox(3);
  const Place there{Place::Kind::configure, 7};
  mailbox.enter(kHere);
  EXPECT_FALSE(mailbox.differs());
  EXPECT_FALSE(mailbox.heard_all(kMe));
  mailbox.accept(1, frame(1, {}));
  mailbox.accept(1, frame(2, {}, there));  // later: may be anywhere
  EXPECT_FALSE(mailbox.differs());
  mailbox.accept(2, frame(1, {}, there));
  EXPECT_TRUE(mailbox.differs());
  EXPECT_TRUE(mailbox.heard_all(kMe));
  EXPECT_EQ(mailbox.places(kMe),
            "rank 0: step 7; rank 1: step 7; rank 2: configure() before step 7");
  mailbox.enter(there);
  EXPECT_FALSE(mailbox.differs());
  EXPECT_EQ(mailbox.places(kMe),
            "rank 0: configure() before step 7; rank 1: configure() before step 7; rank 2: not "
            "heard of");
}

// ---- damage and loss ---------------------------------------------------------------------------

struct Damaged {
  const char* name;
  std::vector<Bytes> frames;
};

std::vector<Damaged> damaged_frames() {
  const Bytes good = frame(1, message({0, 0}, "good"));
  const auto changed = [&](std::size_t place, int value) {
    Bytes bytes = good;
    bytes[place] = static_cast<std::byte>(value);
    return bytes;
  };
  const auto endless = [](std::size_t before) {  // numbers that are right, then one without an end
    Bytes stream(before, std::byte{1});
    stream.resize(before + 9, std::byte{0x80});
    return frame(1, stream);
  };
  Bytes wide;
  append_varint(wide, std::uint64_t{1} << 32);
  append(wide, message({0, 0}, ""));
  const Bytes cut = message({0, 1}, "long");
  const auto part = [&](std::size_t count) { return frame(1, std::span(cut).first(count)); };
  return {
      {"none of topreduce's", {Bytes{}}},
      {"none of topreduce's", {Bytes(good.begin(), good.begin() + 15)}},
      {"none of topreduce's", {changed(1, 0)}},
      {"version 99", {changed(2, 99)}},
      {"head was damaged", {changed(3, 100)}},
      {"of an unknown place", {frame(1, {}, {static_cast<Place::Kind>(100), 7})}},
      {"without a head", {endless(0)}},
      {"without a head", {endless(1)}},
      {"without a head", {endless(2)}},
      {"without a head", {frame(1, wide)}},
      {"the same message twice", {good, good}},
      {"out of order", {good, frame(0, {}, {})}},
      {"out of order", {part(2), frame(2, {})}},
      {"out of order", {part(5), frame(2, {})}},
  };
}

TEST(Mailbox, DamageIsAWireErrorForThoseThatWait) {
  for (const auto& [name, frames] : damaged_frames()) {
    Mailbox mailbox(3);
    const Tag tag{9, 9};
    mailbox.enter(kHere);
    const std::uint64_t known = mailbox.version();
    for (const Bytes& bytes : frames) mailbox.accept(kPeer, bytes);
    EXPECT_NE(mailbox.version(), known);
    EXPECT_EQ(error_of(mailbox), "") << "nothing is expected";
    mailbox.expect(tag, 2);
    EXPECT_EQ(error_of(mailbox), "") << "not of this one";
    mailbox.expect(tag, kPeer);
    const std::string error = error_of(mailbox);
    EXPECT_TRUE(error.starts_with("wire: rank 1 sent ")) << error;
    EXPECT_TRUE(error.ends_with("; noticed by rank 0, step 7, bucket of parameter 9")) << error;
    EXPECT_NE(error.find(name), std::string::npos) << name << ": " << error;

    mailbox.accept(kPeer, frame(2, message(tag, "after it")));  // is not read
    mailbox.accept(2, frame(1, message(tag, "of others")));
    EXPECT_EQ(mailbox.arrived(tag), 1u);
  }
}

TEST(Mailbox, ALengthIsOnlyAClaim) {
  Mailbox mailbox(2);
  Bytes stream;
  for (const std::uint64_t number : {std::uint64_t{0}, std::uint64_t{0}, std::uint64_t{1} << 62}) {
    append_varint(stream, number);
  }
  EXPECT_NO_THROW(mailbox.accept(kPeer, frame(0, stream, {})));
  EXPECT_NO_THROW(mailbox.accept(kPeer, frame(0, text("a little"), {})));
  EXPECT_EQ(arrived(mailbox, {0, 0}), 0u);
}

TEST(Mailbox, ALostPeerIsMissedWhereItIsExpected) {
  Mailbox mailbox(2);
  const Tag here{0, 0}, missing{0, 1};
  mailbox.expect(here, kPeer);
  mailbox.accept(kPeer, frame(0, message(here, "before"), {}));
  mailbox.lose(kPeer, Loss::gone, "the first reason");
  mailbox.lose(kPeer, Loss::damaged, "the second");
  EXPECT_EQ(error_of(mailbox), "");
  EXPECT_EQ(words(mailbox, here), "before");
  mailbox.expect(missing, kPeer);
  EXPECT_EQ(error_of(mailbox),
            "comm: rank 1 the first reason; noticed by rank 0, before its first call, bucket of "
            "parameter 0");
  mailbox.release(missing);
  EXPECT_EQ(error_of(mailbox), "");
}

// Of those it waits for; what another one sends does not make up for it.
TEST(Mailbox, ASilentPeerIsLostWhenTimeIsUp) {
  Mailbox mailbox(4);
  mailbox.set_timeout(std::chrono::milliseconds(20));
  mailbox.enter(kHere);
  mailbox.expect({5, 0}, kPeer);
  mailbox.expect({5, 0}, 2);
  mailbox.start_waiting();
  mailbox.accept(2, frame(1, message({5, 0}, "here")));
  for (std::uint64_t known = mailbox.version(); error_of(mailbox).empty();
       known = mailbox.version()) {
    mailbox.accept(3, frame(1, {}));
    mailbox.wait(known + 1);
  }
  EXPECT_TRUE(error_of(mailbox).starts_with("comm: rank 1 is silent: nothing came of it for 20 ms"))
      << error_of(mailbox);
  EXPECT_TRUE(error_of(mailbox).ends_with("; noticed by rank 0, step 7, bucket of parameter 5"))
      << error_of(mailbox);
  EXPECT_TRUE(mailbox.awaited().empty());
  mailbox.release({5, 0});
  mailbox.expect({kVote, 0}, 2);
  EXPECT_EQ(error_of(mailbox), "") << "the others are not lost";
  EXPECT_EQ(mailbox.whereabouts(), "step 7, the vote");
}

// ---- other threads -----------------------------------------------------------------------------

TEST(Mailbox, TellsWhomItWaitsFor) {
  Mailbox mailbox(4);
  const Tag tag{0, 0};
  EXPECT_EQ(mailbox.awaited(), std::vector<int>{});
  mailbox.expect(tag, 1);
  mailbox.expect(tag, 3);
  EXPECT_EQ(mailbox.awaited(), (std::vector<int>{1, 3}));
  mailbox.lose(1, Loss::gone, "left");
  EXPECT_EQ(mailbox.awaited(), std::vector<int>{3});
  mailbox.accept(3, frame(0, message(tag, "here"), {}));
  EXPECT_EQ(mailbox.awaited(), std::vector<int>{});
}

TEST(Mailbox, WakesWhoWaits) {
  Mailbox mailbox(2);
  const auto wakes = [&](auto&& what) {
    const std::uint64_t known = mailbox.version();
    std::jthread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      what();
    });
    mailbox.wait(known);
    EXPECT_NE(mailbox.version(), known);
  };
  wakes([&] { mailbox.accept(kPeer, frame(0, message({0, 0}, ""), {})); });
  wakes([&] { mailbox.lose(kPeer, Loss::gone, "left"); });
}

// As a transport with a thread of its own: one receives what is expected, and the rank waits.
TEST(Mailbox, AThreadPassesOnWhatIsExpected) {
  constexpr int kRounds = 200;
  Mailbox mailbox(3);
  std::jthread receiver([&](const std::stop_token& stop) {
    std::vector<std::uint32_t> next(3, 0);  // by peer: its round
    while (!stop.stop_requested()) {
      for (const int peer : mailbox.awaited()) {
        const std::uint32_t round = next[at(peer)]++;
        mailbox.accept(peer, frame(round, message({peer == 1 ? 0u : 1u, round}, "x"), {}));
      }
      std::this_thread::yield();
    }
  });
  for (std::uint32_t round = 0; round < kRounds; ++round) {
    if (round > 0) mailbox.enter({});
    mailbox.stay();
    for (const int peer : {1, 2}) mailbox.expect({peer == 1 ? 0u : 1u, round}, peer);
    for (const int peer : {1, 2}) {
      const Tag tag{peer == 1 ? 0u : 1u, round};
      for (std::uint64_t known = mailbox.version(); mailbox.arrived(tag) == 0;
           known = mailbox.version()) {
        mailbox.wait(known);
      }
      EXPECT_EQ(words(mailbox, tag, peer), "x");
      mailbox.release(tag);
    }
  }
}

}  // namespace
}  // namespace topreduce::comm
