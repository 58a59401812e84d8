#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <string_view>

#include <gtest/gtest.h>

#include "topreduce/wire/checksum.h"
#include "topreduce/wire/little_endian.h"
#include "topreduce/wire/message.h"

namespace topreduce::wire {
namespace {

constexpr Values kEncodings[] = {Values::fp32, Values::bf16, Values::fp16};
constexpr Index kLargestUniverse = 0xffffffff;
constexpr std::size_t kHeader = 44;

Envelope envelope_of(Index universe, Values values) {
  return {.run = 0x12345678, .step = 77, .bucket = 5, .universe = universe, .values = values};
}

std::size_t bytes_of(Values values) {
  return values == Values::fp32 ? 4 : 2;
}

SparseVector entries_at(const std::vector<Index>& indices) {
  std::mt19937 rng(7);
  std::normal_distribution<float> normal;
  SparseVector entries;
  for (const Index index : indices) entries.push_back(index, normal(rng));
  return entries;
}

/// Every entry of [0, universe) with the given probability.
std::vector<Index> random_indices(Index universe, double density) {
  std::mt19937 rng(3);
  std::bernoulli_distribution chosen(density);
  std::vector<Index> indices;
  for (Index i = 0; i < universe; ++i) {
    if (chosen(rng)) indices.push_back(i);
  }
  return indices;
}

template <class A, class B>
bool same_bits(const A& a, const B& b) {
  return std::ranges::equal(std::as_bytes(std::span(a)), std::as_bytes(std::span(b)));
}

void fix_checksum(Bytes& message) {
  const auto bytes = std::span<const std::byte>(message);
  store(message.data() + 40, checksum(bytes.first(40), bytes.subspan(kHeader)));
}

void fix_length_and_checksum(Bytes& message) {
  store(message.data() + 32, std::uint64_t{message.size() - kHeader});
  fix_checksum(message);
}

/// The text of the WireError; empty if the message is accepted.
std::string refusal(const Envelope& expected, std::span<const std::byte> message) {
  // A copy without spare room, so that the sanitizer sees a reader that runs over the end.
  const std::vector<std::byte> exact(message.begin(), message.end());
  SparseVector entries;
  try {
    unpack(expected, exact, entries);
  } catch (const WireError& error) {
    return error.what();
  }
  EXPECT_EQ(entries.indices.size(), entries.values.size());
  EXPECT_EQ(std::ranges::adjacent_find(entries.indices, std::greater_equal<>{}),
            entries.indices.end());
  EXPECT_TRUE(entries.empty() || entries.indices.back() < expected.universe);
  return "";
}

// ---- round trips ----------------------------------------------------------------------------

class WireRoundTrip : public testing::TestWithParam<Values> {};

INSTANTIATE_TEST_SUITE_P(Wire, WireRoundTrip, testing::ValuesIn(kEncodings));

void expect_round_trip(Index universe, Values values, const std::vector<Index>& indices) {
  const auto envelope = envelope_of(universe, values);
  for (const Vote vote : {Vote::no, Vote::yes, Vote::ask}) {
    auto sent = entries_at(indices);
    const auto original = sent;
    Bytes message;
    pack(envelope, vote, sent, message);
    EXPECT_LE(message.size(), largest_message(indices.size(), values));

    SparseVector received = entries_at({1, 2, 3});  // is replaced
    EXPECT_EQ(unpack(envelope, message, received), vote);
    EXPECT_TRUE(same_bits(received.indices, indices));
    EXPECT_TRUE(same_bits(received.values, sent.values)) << "settled is not what peers read";
    for (std::size_t i = 0; i < sent.size(); ++i) {
      const float owed = original.values[i] - sent.values[i];
      EXPECT_EQ(sent.values[i] + owed, original.values[i]) << "the rounding is not owed exactly";
    }
  }
}

TEST_P(WireRoundTrip, KeepsEveryEntry) {
  expect_round_trip(0, GetParam(), {});
  expect_round_trip(1, GetParam(), {0});
  expect_round_trip(10, GetParam(), {});
  expect_round_trip(10, GetParam(), {0});
  expect_round_trip(10, GetParam(), {9});
  expect_round_trip(10, GetParam(), {0, 9});
  for (const double density : {0.001, 0.01, 0.1, 0.5, 1.0}) {
    expect_round_trip(20000, GetParam(), random_indices(20000, density));
  }
}

TEST_P(WireRoundTrip, KeepsGapsOfAllLengths) {
  const std::pair<Index, std::size_t> gaps_and_bytes[] = {{0, 1},       {1, 1},
                                                          {127, 1},     {128, 2},
                                                          {129, 2},     {16383, 2},
                                                          {16384, 3},   {(1 << 21) - 1, 3},
                                                          {1 << 21, 4}, {(1 << 28) - 1, 4},
                                                          {1 << 28, 5}, {0xfffffffd - 3, 5}};
  for (const auto& [gap, bytes] : gaps_and_bytes) {
    const std::vector<Index> indices = {2, 2 + gap + 1};
    expect_round_trip(kLargestUniverse, GetParam(), indices);
    auto entries = entries_at(indices);
    Bytes message;
    pack(envelope_of(kLargestUniverse, GetParam()), Vote::yes, entries, message);
    EXPECT_EQ(message.size(), kHeader + 1 + bytes + 2 * bytes_of(GetParam())) << "gap " << gap;
  }
  expect_round_trip(kLargestUniverse, GetParam(), {kLargestUniverse - 1});
  expect_round_trip(kLargestUniverse, GetParam(), {0, kLargestUniverse - 2, kLargestUniverse - 1});
  std::vector<Index> all;
  for (std::uint64_t index = 0; index < kLargestUniverse; index += 1 + (index >> 6)) {
    all.push_back(static_cast<Index>(index));
  }
  expect_round_trip(kLargestUniverse, GetParam(), all);
}

TEST_P(WireRoundTrip, KeepsStretches) {
  const auto envelope = envelope_of(2000, GetParam());
  for (const std::size_t length : {0u, 1u, 7u, 1000u, 2000u}) {
    auto sent = entries_at(std::vector<Index>(length)).values;
    Bytes message;
    pack_stretch(envelope, Vote::yes, sent, message);
    EXPECT_EQ(message.size(), kHeader + length * bytes_of(GetParam()));
    Buffer<float> received(length);
    EXPECT_EQ(unpack_stretch(envelope, message, received), Vote::yes);
    EXPECT_TRUE(same_bits(received, sent));

    Buffer<float> longer(length + 1);
    EXPECT_THROW(unpack_stretch(envelope, message, longer), WireError);
    SparseVector entries;
    EXPECT_THROW(unpack(envelope, message, entries), WireError);
  }
}

TEST_P(WireRoundTrip, AppendsWithoutMovingWhatIsThere) {
  const auto envelope = envelope_of(1000, GetParam());
  auto first = entries_at({1, 200, 999});
  auto second = entries_at(random_indices(1000, 0.5));
  Bytes out;
  out.reserve(largest_message(first.size(), GetParam()) +
              largest_message(second.size(), GetParam()));
  const std::byte* const place = out.data();
  pack(envelope, Vote::yes, first, out);
  const std::size_t border = out.size();
  pack(envelope, Vote::no, second, out);
  EXPECT_EQ(out.data(), place) << "largest_message was not enough";

  SparseVector received;
  const auto bytes = std::span<const std::byte>(out);
  EXPECT_EQ(unpack(envelope, bytes.first(border), received), Vote::yes);
  EXPECT_TRUE(same_bits(received.values, first.values));
  EXPECT_EQ(unpack(envelope, bytes.subspan(border), received), Vote::no);
  EXPECT_TRUE(same_bits(received.values, second.values));
}

TEST(Wire, AnIndexTakesAtMostElevenBitsAtOnePercent) {
  for (const Values values : kEncodings) {
    auto entries = entries_at(random_indices(1000000, 0.01));
    Bytes message;
    pack(envelope_of(1000000, values), Vote::yes, entries, message);
    const auto count = static_cast<double>(entries.size());
    EXPECT_GT(count, 9000);
    const auto bits = static_cast<double>(8 * message.size());
    EXPECT_LE(bits / count, 11 + 8 * static_cast<double>(bytes_of(values)));
  }
}

// ---- rounding -------------------------------------------------------------------------------

/// What values read as after their journey.
std::vector<float> rounded(Values encoding, std::vector<float> values) {
  Bytes message;
  const auto envelope = envelope_of(kLargestUniverse, encoding);
  std::vector<float> received(values.size());
  pack_stretch(envelope, Vote::yes, values, message);
  unpack_stretch(envelope, message, received);
  EXPECT_TRUE(same_bits(received, values));
  return received;
}

float rounded(Values encoding, float value) {
  return rounded(encoding, std::vector<float>{value}).front();
}

/// The definition: to the nearest multiple of the step at this size, ties to the even one.
float nearest(float value, int digits, int smallest_exponent, double largest) {
  if (value == 0) return value;
  const int exponent = std::max(std::ilogb(value), smallest_exponent);
  const double step = std::ldexp(1.0, exponent - digits);
  const double near = std::nearbyint(static_cast<double>(value) / step) * step;
  return static_cast<float>(std::copysign(std::min(std::abs(near), largest), value));
}

// Every bf16 number, every fp16 number, their neighbours and the ties between them.
TEST(WireRounding, IsToNearestEven) {
  std::vector<float> values;
  const auto add = [&values](std::uint32_t bits) {
    if (std::isfinite(std::bit_cast<float>(bits))) values.push_back(std::bit_cast<float>(bits));
  };
  for (std::uint32_t top = 0; top < 0x10000; ++top) {
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      add((top << 16) | low);
    }
  }
  for (std::uint32_t top = 0x33000; top <= 0x47800; ++top) {  // from 2^-25 to 2^16
    for (const std::uint32_t low : {0x000u, 0x001u, 0xfffu}) {
      add((top << 12) | low);
      add((top << 12) | low | 0x80000000u);
    }
  }
  const auto bf16 = rounded(Values::bf16, values), fp16 = rounded(Values::fp16, values);
  int wrong = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float both[] = {bf16[i], fp16[i]};
    const float expected[] = {nearest(values[i], 7, -126, 0x1.fep127),
                              nearest(values[i], 10, -14, 65504)};
    if (same_bits(both, expected)) continue;
    if (++wrong < 10) ADD_FAILURE() << std::hexfloat << values[i];
  }
  EXPECT_EQ(wrong, 0);
  // One by one they go through other code than many at once.
  for (std::size_t i = 0; i < values.size(); i += 97) {
    EXPECT_EQ(rounded(Values::bf16, values[i]), bf16[i]);
    EXPECT_EQ(rounded(Values::fp16, values[i]), fp16[i]);
  }
}

TEST(WireRounding, SaturatesSoThatTheRestStaysOwed) {
  constexpr float kMax = std::numeric_limits<float>::max();
  for (const float sign : {1.0f, -1.0f}) {
    EXPECT_EQ(rounded(Values::fp16, sign * 65519), sign * 65504);
    EXPECT_EQ(rounded(Values::fp16, sign * 65520), sign * 65504);
    EXPECT_EQ(rounded(Values::fp16, sign * 1e30f), sign * 65504);
    EXPECT_EQ(rounded(Values::fp16, sign * kMax), sign * 65504);
    EXPECT_EQ(rounded(Values::bf16, sign * kMax), sign * 0x1.fep127f);
    EXPECT_EQ(rounded(Values::fp32, sign * kMax), sign * kMax);
    EXPECT_EQ(rounded(Values::fp16, sign * 0x1p-24f), sign * 0x1p-24f);
    EXPECT_EQ(rounded(Values::fp16, sign * 0x1p-25f), 0);
  }
}

TEST(WireRounding, LetsInfinityAndNanThrough) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const Values values : kEncodings) {
    EXPECT_EQ(rounded(values, kInfinity), kInfinity);
    EXPECT_EQ(rounded(values, -kInfinity), -kInfinity);
    for (const std::uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xffffffffu}) {
      EXPECT_TRUE(std::isnan(rounded(values, std::bit_cast<float>(bits))));
    }
  }
}

// ---- messages that are refused --------------------------------------------------------------

Bytes small_message(const Envelope& envelope) {
  auto entries = entries_at({0, 5, 6, 300, 20000, 59999});
  Bytes message;
  pack(envelope, Vote::yes, entries, message);
  return message;
}

const Envelope kExpected = envelope_of(60000, Values::bf16);

struct Field {
  const char* name;
  std::size_t at;
  std::size_t size;
};

// The layout of the header, written down a second time.
constexpr Field kFields[] = {
    {"magic", 0, 4},
    {"version", 4, 1},
    {"kind", 5, 1},
    {"values encoding", 6, 1},
    {"vote", 7, 1},
    {"run", 8, 4},
    {"bucket", 12, 4},
    {"step", 16, 8},
    {"universe", 24, 4},
    {"count", 28, 4},
    {"payload length", 32, 8},
    {"checksum", 40, 4},
};

TEST(WireHeader, HasThisLayout) {
  auto entries = entries_at({3, 300});
  entries.values = {1.0f, -2.0f};
  Bytes message;
  pack({.run = 0xa1a2a3a4,
        .step = 0xb1b2b3b4b5b6b7b8,
        .bucket = 0xc1c2c3c4,
        .universe = 0xd1d2d3d4,
        .values = Values::bf16},
       Vote::yes, entries, message);
  const std::uint8_t expected[] = {'T',  'P',  'R',  '1',   // magic
                                   1,    1,    1,    1,     // version, kind, values, vote
                                   0xa4, 0xa3, 0xa2, 0xa1,  // run
                                   0xc4, 0xc3, 0xc2, 0xc1,  // bucket
                                   0xb8, 0xb7, 0xb6, 0xb5, 0xb4, 0xb3, 0xb2, 0xb1,  // step
                                   0xd4, 0xd3, 0xd2, 0xd1,                          // universe
                                   2,    0,    0,    0,                             // count
                                   7,    0,    0,    0,    0,    0,    0,    0};    // payload
  const std::uint8_t payload[] = {3, 0x80 | 40, 2, 0x80, 0x3f, 0x00, 0xc0};
  const auto bytes = std::span<const std::byte>(message);
  EXPECT_TRUE(same_bits(bytes.first(40), expected));
  EXPECT_TRUE(same_bits(bytes.subspan(kHeader), payload));
}

TEST(WireHeader, EveryFieldIsCheckedAndNamed) {
  const Bytes good = small_message(kExpected);
  EXPECT_EQ(refusal(kExpected, good), "");
  for (const Field& field : kFields) {
    for (std::size_t byte = field.at; byte < field.at + field.size; ++byte) {
      Bytes bad = good;
      bad[byte] ^= std::byte{0x80};
      EXPECT_NE(refusal(kExpected, bad), "") << field.name;
      if (field.name == std::string_view("checksum")) continue;
      fix_checksum(bad);
      const std::string text = refusal(kExpected, bad);
      // A smaller or larger count within the universe shows in the payload's length or end.
      const bool other_symptom = field.name == std::string_view("count") && text != "";
      EXPECT_TRUE(other_symptom || text.find(field.name) != std::string::npos)
          << field.name << ": " << text;
      EXPECT_NE(text.find("expected"), std::string::npos) << text;
    }
  }
}

TEST(WireHeader, SaysWhatWasExpectedAndWhatCame) {
  const Bytes message = small_message(kExpected);
  const auto text_for = [&](auto change) {
    Envelope other = kExpected;
    change(other);
    return refusal(other, message);
  };
  EXPECT_EQ(text_for([](Envelope& e) { e.step = 78; }), "message: step is 77, expected 78");
  EXPECT_EQ(text_for([](Envelope& e) { e.bucket = 4; }), "message: bucket is 5, expected 4");
  EXPECT_EQ(text_for([](Envelope& e) { e.run = 1; }), "message: run is 305419896, expected 1");
  EXPECT_EQ(text_for([](Envelope& e) { e.universe = 9; }),
            "message: universe is 60000, expected 9");
  EXPECT_EQ(text_for([](Envelope& e) { e.values = Values::fp32; }),
            "message: values encoding is 1, expected 0");
  EXPECT_EQ(refusal(kExpected, std::span(message).first(12)),
            "message: length is 12, expected at least 44");
}

TEST(WireRefusal, EveryFlippedByteIsFound) {
  const Bytes good = small_message(kExpected);
  for (std::size_t i = 0; i < good.size(); ++i) {
    for (unsigned flip = 1; flip < 256; ++flip) {
      Bytes bad = good;
      bad[i] ^= static_cast<std::byte>(flip);
      EXPECT_NE(refusal(kExpected, bad), "") << "byte " << i << " flip " << flip;
    }
  }
}

TEST(WireRefusal, EveryOtherLengthIsFound) {
  const Bytes good = small_message(kExpected);
  for (std::size_t length = 0; length < good.size(); ++length) {
    Bytes bad(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(length));
    EXPECT_NE(refusal(kExpected, bad), "") << length;
    if (length < kHeader) continue;
    fix_length_and_checksum(bad);
    EXPECT_NE(refusal(kExpected, bad), "") << length << " bytes, sealed";
  }
  Bytes longer = good;
  longer.push_back(std::byte{0});
  EXPECT_NE(refusal(kExpected, longer), "");
  fix_length_and_checksum(longer);
  EXPECT_NE(refusal(kExpected, longer), "");
}

/// A sealed message that claims `count` entries, with these gap bytes. The bytes of its values look
/// like gaps that go on, so they stop nobody who runs into them.
Bytes forged(const Envelope& envelope, std::uint32_t count, const std::vector<unsigned>& gaps) {
  SparseVector none;
  Bytes message;
  pack(envelope, Vote::yes, none, message);
  for (const unsigned byte : gaps) message.push_back(static_cast<std::byte>(byte));
  message.resize(message.size() + std::min(count, 20u) * bytes_of(envelope.values),
                 std::byte{0xff});
  store(message.data() + 28, count);
  fix_length_and_checksum(message);
  return message;
}

TEST(WireRefusal, IndicesStayInTheUniverse) {
  const auto ten = envelope_of(10, Values::fp16);
  EXPECT_EQ(refusal(ten, forged(ten, 2, {0, 8})), "");
  EXPECT_EQ(refusal(ten, forged(ten, 2, {0, 9})), "message: index 1 is 10, expected less than 10");
  EXPECT_NE(refusal(ten, forged(ten, 1, {10})), "");
  // 2^32 and more must not wrap round to a small index.
  const auto largest = envelope_of(kLargestUniverse, Values::fp16);
  EXPECT_EQ(refusal(largest, forged(largest, 1, {0xfe, 0xff, 0xff, 0xff, 0x0f})), "");
  EXPECT_NE(refusal(largest, forged(largest, 1, {0xff, 0xff, 0xff, 0xff, 0x0f})), "");
  EXPECT_NE(refusal(largest, forged(largest, 1, {0x80, 0x80, 0x80, 0x80, 0x10})), "");
  EXPECT_NE(refusal(largest, forged(largest, 2, {5, 0xff, 0xff, 0xff, 0xff, 0x0f})), "");
  EXPECT_NE(refusal(largest, forged(largest, 1, {0x80, 0x80, 0x80, 0x80, 0x80, 0x00})), "");
  EXPECT_NE(refusal(largest, forged(largest, 1, {0x80})), "");
  EXPECT_NE(refusal(largest, forged(largest, 2, {0x80, 0x80})), "");
  EXPECT_NE(refusal(largest, forged(largest, 1, {1, 1})), "");
}

TEST(WireRefusal, ALyingCountAllocatesNothing) {
  const auto refusal_of = [](const Envelope& envelope, const Bytes& message) -> std::string {
    SparseVector entries;
    try {
      unpack(envelope, message, entries);
    } catch (const WireError& error) {
      EXPECT_EQ(entries.indices.capacity(), 0u);
      EXPECT_EQ(entries.values.capacity(), 0u);
      return error.what();
    }
    return "";
  };
  const auto large = envelope_of(kLargestUniverse, Values::fp32);
  for (const std::uint32_t count : {1000u, 0x7fffffffu, 0xffffffffu}) {
    EXPECT_NE(refusal_of(large, forged(large, count, {1, 2, 3})), "");
  }
  EXPECT_EQ(refusal_of(large, forged(large, 10, {1, 2, 3})),
            "message: payload length is 43, expected at least 50 for 10 entries");
  const auto ten = envelope_of(10, Values::fp32);
  EXPECT_EQ(refusal_of(ten, forged(ten, 11, std::vector<unsigned>(11))),
            "message: count is 11, expected at most 10");
}

TEST(WireRefusal, AStretchHasNoOtherLength) {
  const auto envelope = envelope_of(10, Values::bf16);
  Buffer<float> values(3, 1.0f);
  Bytes good;
  pack_stretch(envelope, Vote::yes, values, good);
  for (std::size_t length = kHeader; length < kHeader + 12; ++length) {
    Bytes message = good;
    message.resize(length, std::byte{0});
    fix_length_and_checksum(message);
    if (length == good.size()) {
      EXPECT_EQ(unpack_stretch(envelope, message, values), Vote::yes);
    } else {
      EXPECT_THROW(unpack_stretch(envelope, message, values), WireError) << length;
    }
  }
}

// ---- any bytes at all -----------------------------------------------------------------------

class WireFuzz : public testing::Test {
 protected:
  static constexpr int kTimes = 200000;

  std::size_t below(std::size_t bound) {
    return std::uniform_int_distribution<std::size_t>(0, bound - 1)(rng_);
  }
  std::byte any_byte() { return static_cast<std::byte>(below(256)); }

  void try_message(const Envelope& envelope, const Bytes& message) {
    ++(refusal(envelope, message).empty() ? accepted_ : refused_);
    float values[3];
    try {
      unpack_stretch(envelope, message, values);
    } catch (const WireError&) {
    }
  }

  std::mt19937 rng_{20261115};
  int accepted_ = 0, refused_ = 0;
};

// Half of them get a header that passes, so that the payload is really looked at.
TEST_F(WireFuzz, RandomBytesAreAMessageOrAnError) {
  for (int time = 0; time < kTimes; ++time) {
    const auto envelope = envelope_of(static_cast<Index>(1 + below(1000)), kEncodings[below(3)]);
    Bytes message;
    const bool sealed = time % 2 == 0;
    if (sealed) {
      message = forged(envelope, 0, {});
      store(message.data() + 28, static_cast<std::uint32_t>(below(6)));
      message[5] = static_cast<std::byte>(1 + below(2));
    }
    for (std::size_t left = below(sealed ? 20 : 120); left > 0; --left) {
      message.push_back(any_byte());
    }
    if (sealed) fix_length_and_checksum(message);
    try_message(envelope, message);
  }
  EXPECT_GT(accepted_, 100);
  EXPECT_GT(refused_, kTimes / 2);
}

TEST_F(WireFuzz, ChangedMessagesAreAMessageOrAnError) {
  for (int time = 0; time < kTimes; ++time) {
    const auto envelope = envelope_of(60000, kEncodings[below(3)]);
    Bytes message = small_message(envelope);
    for (std::size_t changes = 1 + below(4); changes > 0; --changes) {
      const std::size_t at = below(message.size());
      switch (below(4)) {
        case 0: message[at] = any_byte(); break;
        case 1: message[at] ^= static_cast<std::byte>(1u << below(8)); break;
        case 2:
          message.insert(message.begin() + static_cast<std::ptrdiff_t>(at), any_byte());
          break;
        case 3: message.erase(message.begin() + static_cast<std::ptrdiff_t>(at)); break;
      }
    }
    if (time % 2 == 0 && message.size() >= kHeader) fix_length_and_checksum(message);
    try_message(envelope, message);
  }
  EXPECT_GT(accepted_, 100);
  EXPECT_GT(refused_, kTimes / 2);
}

// ---- the caller's mistakes, the checksum ----------------------------------------------------

TEST(Wire, MistakesOfTheCallerAreRefused) {
  Bytes out;
  auto outside = entries_at({3, 10});
  EXPECT_THROW(pack(envelope_of(10, Values::fp32), Vote::yes, outside, out), std::invalid_argument);
  auto uneven = entries_at({3, 4});
  uneven.values.pop_back();
  EXPECT_THROW(pack(envelope_of(10, Values::fp32), Vote::yes, uneven, out), std::invalid_argument);
  Buffer<float> too_long(11, 0.0f);
  EXPECT_THROW(pack_stretch(envelope_of(10, Values::fp32), Vote::yes, too_long, out),
               std::invalid_argument);
  auto entries = entries_at({3, 4});
  EXPECT_THROW(pack(envelope_of(10, static_cast<Values>(9)), Vote::yes, entries, out),
               std::invalid_argument);
  EXPECT_TRUE(out.empty());
}

TEST(WireChecksum, IsXxh64) {
  const auto hash = [](std::string_view text) { return xxh64(std::as_bytes(std::span(text)), 0); };
  EXPECT_EQ(hash(""), 0xef46db3751d8e999u);
  EXPECT_EQ(hash("a"), 0xd24ec4f1a98c6e5bu);
  EXPECT_EQ(hash("abc"), 0x44bc2cf5ad770999u);
  EXPECT_EQ(hash("Nobody inspects the spammish repetition"), 0xfbcea83c8a378bf1u);
  EXPECT_EQ(hash("The quick brown fox jumps over the lazy dog"), 0x0b242d361fda71bcu);
}

}  // namespace
}  // namespace topreduce::wire
