#include "topreduce/comm/sockets.h"

#include <array>
#include <chrono>
#include <optional>
#include <random>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

#include <gtest/gtest.h>

namespace topreduce::comm {
namespace {

using namespace std::chrono_literals;
using Kind = Sockets::Kind;

Bytes bytes_of(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  Bytes bytes(size);
  for (std::byte& each : bytes) each = static_cast<std::byte>(random() & 0xff);
  return bytes;
}

struct Came {
  int peer;
  Kind kind;
  Bytes frame;
};

/// Rank 0 of two, and the raw other end of its connection.
class SocketsTest : public testing::Test {
 protected:
  SocketsTest() {
    std::array<int, 2> ends{};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
    sockets_.emplace(std::vector<int>{-1, ends[0]});
    other_ = ends[1];
  }
  ~SocketsTest() override { close_other(); }

  void close_other() {
    if (other_ >= 0) close(other_);
    other_ = -1;
  }
  void write_raw(std::span<const std::byte> bytes) {
    ASSERT_EQ(write(other_, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }
  void move() {
    sockets_->move({[&](int peer, Kind kind, Bytes& frame) {
                      came_.push_back({peer, kind, frame});
                    },
                    [&](int peer, const std::string& why) {
                      EXPECT_EQ(peer, 1);
                      lost_.push_back(why);
                    }});
  }

  std::optional<Sockets> sockets_;
  int other_ = -1;
  std::vector<Came> came_;
  std::vector<std::string> lost_;
};

Bytes framed(const Bytes& content, std::uint32_t kind = 0) {
  const auto size = static_cast<std::uint32_t>(content.size()) | kind << 30;
  Bytes bytes(4);
  for (int i = 0; i < 4; ++i) bytes[static_cast<std::size_t>(i)] = std::byte(size >> 8 * i & 0xff);
  append(bytes, content);
  return bytes;
}

TEST_F(SocketsTest, FramesComeWhereverTheStreamIsCut) {
  for (const std::size_t size : {0u, 1u, 5u, 1000u}) {
    const Bytes content = bytes_of(size, 7);
    Bytes stream = framed(content);
    append(stream, framed(content, 1));
    for (std::size_t cut = 0; cut <= stream.size(); cut += size > 100 ? 97 : 1) {
      came_.clear();
      if (cut > 0) write_raw(std::span(stream).first(cut));
      move();
      if (cut < stream.size()) write_raw(std::span(stream).subspan(cut));
      move();
      ASSERT_EQ(came_.size(), 2u) << size << " cut at " << cut;
      EXPECT_EQ(came_[0].kind, Kind::frame);
      EXPECT_EQ(came_[1].kind, Kind::word);
      for (const Came& each : came_) EXPECT_EQ(each.frame, content);
    }
  }
  EXPECT_TRUE(lost_.empty());
}

// What does not fit into the system's buffers waits, and nobody waits for it.
TEST_F(SocketsTest, MuchIsSentWhileNobodyReads) {
  std::array<int, 2> ends{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  Sockets here(std::vector<int>{-1, ends[0]}), there(std::vector<int>{ends[1], -1});
  std::vector<Bytes> sent;
  for (unsigned i = 0; i < 40; ++i) {
    sent.push_back(bytes_of(i % 4 == 3 ? 1'000'000 : 100 * i, i));
    here.send(1, Kind::frame, sent.back());
  }
  EXPECT_TRUE(here.queued());
  std::vector<Bytes> received;
  const Sockets::Receiver nobody{[](int, Kind, Bytes&) { FAIL(); },
                                 [](int, const std::string&) { FAIL(); }};
  const Sockets::Receiver reader{[&](int peer, Kind, Bytes& frame) {
                                   EXPECT_EQ(peer, 0);
                                   received.push_back(frame);
                                 },
                                 [](int, const std::string&) { FAIL(); }};
  for (int turn = 0; turn < 100'000 && received.size() < sent.size(); ++turn) {
    here.move(nobody);
    there.move(reader);
  }
  EXPECT_EQ(received, sent);
  EXPECT_FALSE(here.queued());
  EXPECT_TRUE(here.drain(1s).empty());
}

TEST_F(SocketsTest, APeerThatClosesIsLostOnceAndWhatItSentIsNot) {
  const Bytes content = bytes_of(10, 1);
  const Bytes stream = framed(content);
  write_raw(stream);
  write_raw(std::span(stream).first(7));
  close_other();
  for (int turn = 0; turn < 3; ++turn) move();
  ASSERT_EQ(came_.size(), 1u);
  EXPECT_EQ(came_[0].frame, content);
  EXPECT_EQ(lost_, std::vector<std::string>{"the connection was closed"});
  sockets_->send(1, Kind::frame, content);  // reaches nobody
  EXPECT_FALSE(sockets_->queued());
}

TEST_F(SocketsTest, ALengthThatCannotBeIsRefused) {
  Bytes head(4, std::byte{0xff});
  write_raw(head);
  move();
  EXPECT_EQ(lost_, std::vector<std::string>{"it sent bytes that are none of topreduce's"});
}

TEST_F(SocketsTest, DrainNamesThoseThatTakeNothing) {
  sockets_->send(1, Kind::word, bytes_of(4'000'000, 3));
  EXPECT_EQ(sockets_->drain(20ms), std::vector<int>{1});
}

TEST_F(SocketsTest, DrainDoesNotWaitForThoseThatHaveClosed) {
  sockets_->send(1, Kind::word, bytes_of(4'000'000, 3));
  close_other();
  EXPECT_TRUE(sockets_->drain(1h).empty());
}

TEST_F(SocketsTest, AWaitEndsByAFrameOrAWakeUp) {
  std::thread waker([&] { sockets_->wake(); });
  EXPECT_TRUE(sockets_->wait(60s));
  waker.join();
  sockets_->wake();
  EXPECT_TRUE(sockets_->wait(60s));  // one that was called before
  write_raw(framed(bytes_of(3, 5)));
  EXPECT_FALSE(sockets_->wait(60s));
  move();
  EXPECT_EQ(came_.size(), 1u);
}

TEST_F(SocketsTest, AWaitForAWakeUpEndsByNoFrame) {
  write_raw(framed(bytes_of(3, 5)));
  EXPECT_FALSE(sockets_->wait_for_wake(1ms));
  std::thread waker([&] { sockets_->wake(); });
  EXPECT_TRUE(sockets_->wait_for_wake(60s));
  waker.join();
  sockets_->wake();
  EXPECT_TRUE(sockets_->wait_for_wake(60s));
  EXPECT_FALSE(sockets_->wait_for_wake(0ms));
}

}  // namespace
}  // namespace topreduce::comm
