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

constexpr Values kEncodings[] = {Values::fp32, Values::bf16, Values::fp16, Values::int8,
                                 Values::int4, Values::int2, Values::sign};
static_assert(std::size(kEncodings) == kValuesNames.size());
constexpr Index kLargestUniverse = 0xffffffff;
constexpr std::size_t kHeader = 48;

Envelope envelope_of(Index universe, Values values) {
  return {.run = 0x12345678, .step = 77, .bucket = 5, .universe = universe, .values = values};
}

/// One piece: the whole universe.
struct Whole {
  explicit Whole(const Envelope& envelope) : piece{0, envelope.universe} {}
  operator Pieces() const { return {&piece, 1}; }
  Piece piece;
};

/// In one run.
std::size_t bytes_of(Values values, std::size_t count) {
  switch (values) {
    case Values::fp32: return 4 * count;
    case Values::bf16:
    case Values::fp16: return 2 * count;
    default: break;
  }
  const std::size_t bits = values == Values::int8   ? 8
                           : values == Values::int4 ? 4
                           : values == Values::int2 ? 2
                                                    : 1;
  const std::size_t rest = count % 64;
  return count / 64 * (2 + 8 * bits) + (rest > 0 ? 2 + (bits * rest + 7) / 8 : 0);
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
  store(message.data() + 44, checksum(bytes.first(44), bytes.subspan(kHeader)));
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
    unpack(expected, Whole(expected), exact, entries);
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

/// What is rounded away must be owed to the bit; sign has a tolerance.
void expect_owed(Values values, float original, float sent) {
  const float owed = original - sent;
  if (values != Values::sign) {
    EXPECT_EQ(sent + owed, original) << "the rounding is not owed exactly";
  } else {
    EXPECT_NEAR(sent + owed, original, 0x1p-23f * std::max(std::abs(sent), std::abs(original)));
  }
}

void expect_round_trip(Index universe, Values values, const std::vector<Index>& indices) {
  const auto envelope = envelope_of(universe, values);
  for (const Vote vote : {Vote::no, Vote::yes, Vote::ask}) {
    auto sent = entries_at(indices);
    const auto original = sent;
    Bytes message;
    EXPECT_EQ(pack(envelope, Whole(envelope), vote, sent, message), vote);
    EXPECT_LE(message.size(), largest_message(indices.size(), 1));

    SparseVector received = entries_at({1, 2, 3});  // is replaced
    EXPECT_EQ(unpack(envelope, Whole(envelope), message, received), vote);
    EXPECT_TRUE(same_bits(received.indices, sent.indices));
    EXPECT_TRUE(same_bits(received.values, sent.values)) << "settled is not what peers read";
    std::size_t next = 0;
    for (std::size_t i = 0; i < original.size(); ++i) {
      const bool there = next < sent.size() && sent.indices[next] == original.indices[i];
      expect_owed(values, original.values[i], there ? sent.values[next] : 0);
      next += there ? 1 : 0;
    }
    EXPECT_EQ(next, sent.size());
  }
}

TEST_P(WireRoundTrip, KeepsEveryEntry) {
  expect_round_trip(0, GetParam(), {});
  expect_round_trip(1, GetParam(), {0});
  expect_round_trip(10, GetParam(), {});
  expect_round_trip(10, GetParam(), {0});
  expect_round_trip(10, GetParam(), {9});
  expect_round_trip(10, GetParam(), {0, 9});
  for (const double density : {0.001, 0.01, 0.1, 0.5, 0.6, 0.8, 0.9, 0.97, 0.99, 1.0}) {
    expect_round_trip(20000, GetParam(), random_indices(20000, density));
  }
}

TEST_P(WireRoundTrip, KeepsGapsOfAllLengths) {
  for (unsigned bits = 0; bits < 32; ++bits) {
    for (const std::uint64_t gap : {(1ull << bits) - 1, 1ull << bits, (1ull << bits) + 1}) {
      if (2 + gap + 1 >= kLargestUniverse) continue;
      expect_round_trip(kLargestUniverse, GetParam(), {2, static_cast<Index>(2 + gap + 1)});
    }
  }
  expect_round_trip(kLargestUniverse, GetParam(), {kLargestUniverse - 1});
  expect_round_trip(kLargestUniverse, GetParam(), {0, kLargestUniverse - 2, kLargestUniverse - 1});
  std::vector<Index> all, crowded;
  for (std::uint64_t index = 0; index < kLargestUniverse; index += 1 + (index >> 6)) {
    all.push_back(static_cast<Index>(index));
  }
  expect_round_trip(kLargestUniverse, GetParam(), all);
  // Gaps of zero and one far away, in every place of a block.
  for (Index i = 0; i < 700; ++i) crowded.push_back(i < 300 ? i : kLargestUniverse - 1000 + i);
  expect_round_trip(kLargestUniverse, GetParam(), crowded);
}

// Entries lie in pieces, some of them full, some empty, with room between them.
TEST_P(WireRoundTrip, KeepsPieces) {
  const auto envelope = envelope_of(10000, GetParam());
  const Piece pieces[] = {{3, 3},       {3, 103},     {103, 104},   {150, 1150},  {1150, 1150},
                          {1150, 1214}, {2000, 2700}, {3000, 3001}, {4000, 9000}, {9990, 10000}};
  for (const double density : {0.0, 0.01, 0.3, 0.7, 0.95, 1.0}) {
    std::vector<Index> indices;
    for (const Index index : random_indices(10000, density)) {
      const auto holds = [index](const Piece& piece) {
        return piece.begin <= index && index < piece.end;
      };
      if (std::ranges::any_of(pieces, holds)) indices.push_back(index);
    }
    auto sent = entries_at(indices);
    Bytes message;
    pack(envelope, pieces, Vote::yes, sent, message);
    EXPECT_LE(message.size(), largest_message(indices.size(), std::size(pieces)));
    SparseVector received;
    unpack(envelope, pieces, message, received);
    EXPECT_TRUE(same_bits(received.indices, sent.indices));
    EXPECT_TRUE(same_bits(received.values, sent.values));
  }
}

// How a piece is rounded does not depend on what else is in the message.
TEST_P(WireRoundTrip, PiecesAreRoundedAlone) {
  const auto envelope = envelope_of(1000, GetParam());
  const Piece pieces[] = {{0, 70}, {70, 500}, {500, 1000}};
  for (const double density : {0.1, 0.7, 0.9, 1.0}) {
    auto together = entries_at(random_indices(1000, density));
    auto alone = together;
    Bytes message;
    pack(envelope, pieces, Vote::yes, together, message);
    SparseVector joined;
    for (const Piece& piece : pieces) {
      SparseVector part;
      for (std::size_t i = 0; i < alone.size(); ++i) {
        if (alone.indices[i] < piece.begin || alone.indices[i] >= piece.end) continue;
        part.push_back(alone.indices[i], alone.values[i]);
      }
      pack(envelope, {&piece, 1}, Vote::yes, part, message);
      for (std::size_t i = 0; i < part.size(); ++i) {
        joined.push_back(part.indices[i], part.values[i]);
      }
    }
    EXPECT_TRUE(same_bits(joined.indices, together.indices));
    EXPECT_TRUE(same_bits(joined.values, together.values));
  }
}

TEST_P(WireRoundTrip, KeepsStretches) {
  const auto envelope = envelope_of(2000, GetParam());
  for (const std::size_t length : {0u, 1u, 7u, 1000u, 2000u}) {
    auto sent = entries_at(std::vector<Index>(length)).values;
    Bytes message;
    const std::size_t lengths[] = {length / 3, 0, length - length / 3};
    pack_stretch(envelope, lengths, Vote::yes, sent, message);
    EXPECT_EQ(message.size(),
              kHeader + bytes_of(GetParam(), lengths[0]) + bytes_of(GetParam(), lengths[2]));
    Buffer<float> received(length);
    EXPECT_EQ(unpack_stretch(envelope, lengths, message, received), Vote::yes);
    EXPECT_TRUE(same_bits(received, sent));

    Buffer<float> longer(length + 1);
    EXPECT_THROW(unpack_stretch(envelope, std::vector{length + 1}, message, longer), WireError);
    SparseVector entries;
    EXPECT_THROW(unpack(envelope, Whole(envelope), message, entries), WireError);
  }
}

TEST_P(WireRoundTrip, AppendsWithoutMovingWhatIsThere) {
  const auto envelope = envelope_of(1000, GetParam());
  auto first = entries_at({1, 200, 999});
  auto second = entries_at(random_indices(1000, 0.5));
  Bytes out;
  out.reserve(largest_message(first.size(), 1) + largest_message(second.size(), 1));
  const std::byte* const place = out.data();
  pack(envelope, Whole(envelope), Vote::yes, first, out);
  const std::size_t border = out.size();
  pack(envelope, Whole(envelope), Vote::no, second, out);
  EXPECT_EQ(out.data(), place) << "largest_message was not enough";

  SparseVector received;
  const auto bytes = std::span<const std::byte>(out);
  EXPECT_EQ(first_message(bytes).size(), border);
  EXPECT_EQ(unpack(envelope, Whole(envelope), bytes.first(border), received), Vote::yes);
  EXPECT_TRUE(same_bits(received.values, first.values));
  EXPECT_EQ(unpack(envelope, Whole(envelope), bytes.subspan(border), received), Vote::no);
  EXPECT_TRUE(same_bits(received.values, second.values));
}

// ---- sizes ----------------------------------------------------------------------------------

/// Bits of an index, values and header not counted.
double index_bits(const std::vector<Index>& indices, Index universe) {
  auto entries = entries_at(indices);
  Bytes message;
  const auto envelope = envelope_of(universe, Values::bf16);
  pack(envelope, Whole(envelope), Vote::yes, entries, message);
  const std::size_t bytes = message.size() - kHeader - 1 - bytes_of(Values::bf16, indices.size());
  return static_cast<double>(8 * bytes) / static_cast<double>(indices.size());
}

TEST(WireSize, AnIndexTakesItsEntropyAndLittleMore) {
  const auto expect_near_entropy = [](Index universe, double density) {
    const auto indices = random_indices(universe, density);
    const double p = static_cast<double>(indices.size()) / universe;
    const double entropy = -std::log2(p) - (1 - p) / p * std::log2(1 - p);
    EXPECT_LE(index_bits(indices, universe), entropy + 0.15) << density;
  };
  expect_near_entropy(2'000'000, 0.01);
  expect_near_entropy(20'000'000, 0.001);
}

// Whatever is sent: no more than all of it, the header, and a bit for every piece.
TEST_P(WireRoundTrip, IsNeverLargerThanDense) {
  if (GetParam() == Values::sign) return;  // has no zero: see docs/wire.md
  for (const Index universe : {1u, 7u, 64u, 500u, 30000u}) {
    const auto envelope = envelope_of(universe, GetParam());
    for (int percent = 0; percent <= 100; ++percent) {
      auto entries = entries_at(random_indices(universe, percent / 100.0));
      Bytes message;
      pack(envelope, Whole(envelope), Vote::yes, entries, message);
      EXPECT_LE(message.size(), kHeader + 2 + bytes_of(GetParam(), universe)) << percent;
    }
  }
}

// ---- rounding -------------------------------------------------------------------------------

/// What values read as after their journey.
std::vector<float> rounded(Values encoding, std::vector<float> values) {
  Bytes message;
  const auto envelope = envelope_of(kLargestUniverse, encoding);
  const std::size_t lengths[] = {values.size()};
  std::vector<float> received(values.size());
  pack_stretch(envelope, lengths, Vote::yes, values, message);
  unpack_stretch(envelope, lengths, message, received);
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
  for (const Values values : {Values::fp32, Values::bf16, Values::fp16}) {
    EXPECT_EQ(rounded(values, kInfinity), kInfinity);
    EXPECT_EQ(rounded(values, -kInfinity), -kInfinity);
    for (const std::uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xffffffffu}) {
      EXPECT_TRUE(std::isnan(rounded(values, std::bit_cast<float>(bits))));
    }
  }
}

// ---- blocks that share a scale ----------------------------------------------------------------

constexpr Values kBlockEncodings[] = {Values::int8, Values::int4, Values::int2, Values::sign};

/// Magnitudes from everywhere: like gradients, all alike, tiny, huge, mixed, with zeros.
std::vector<std::vector<float>> many_blocks() {
  std::mt19937 rng(11);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> blocks;
  for (int i = 0; i < 3000; ++i) {
    std::vector<float> block(i % 3 == 0 ? 64 : 1 + rng() % 64);
    const float unit = std::ldexp(1.0f, i % 5 == 0 ? static_cast<int>(rng() % 250) - 130 : 0);
    for (float& x : block) {
      x = normal(rng) * unit;
      if (i % 4 == 1) x = std::copysign(unit, x) + x;  // no small ones
      if (i % 4 == 2) x *= std::exp(3 * normal(rng));  // a long tail
      if (i % 4 == 3)
        x = rng() % 2 == 0 ? 0.0f : std::bit_cast<float>(static_cast<std::uint32_t>(rng()));
      if (!std::isfinite(x)) x = std::numeric_limits<float>::max();
    }
    blocks.push_back(block);
  }
  blocks.push_back(std::vector<float>(64, 0.0f));
  blocks.push_back(std::vector<float>(64, -0.0f));
  blocks.push_back(std::vector<float>(64, std::numeric_limits<float>::max()));
  blocks.push_back(std::vector<float>(64, std::numeric_limits<float>::denorm_min()));
  return blocks;
}

TEST(WireBlocks, TheRestIsOwedToTheBit) {
  for (const Values values : kBlockEncodings) {
    for (const auto& block : many_blocks()) {
      const auto read = rounded(values, block);
      for (std::size_t i = 0; i < block.size(); ++i) {
        ASSERT_TRUE(std::isfinite(read[i]));
        if (values == Values::sign) continue;
        const float owed = block[i] - read[i];
        const double exact = static_cast<double>(block[i]) - static_cast<double>(read[i]);
        ASSERT_EQ(static_cast<double>(owed), exact)
            << kValuesNames[static_cast<std::size_t>(values)] << std::hexfloat << " of " << block[i]
            << " as " << read[i];
      }
    }
  }
}

// The definition of int8 and int4, in plain words.
TEST(WireBlocks, AreTheNearestMultipleOfTheScale) {
  const auto& blocks = many_blocks();
  for (const auto& [values, most] :
       {std::pair(Values::int8, 127.0f), std::pair(Values::int4, 7.0f)}) {
    for (const auto& block : blocks) {
      float largest = 0;
      for (const float x : block) largest = std::max(largest, std::abs(x));
      const float scale =
          rounded(Values::bf16,
                  std::min(largest / most, values == Values::int8 ? 0x1.fep120f : 0x1.fep124f));
      const auto read = rounded(values, block);
      for (std::size_t i = 0; i < block.size(); ++i) {
        const float quotient = scale > 0 ? std::min(std::abs(block[i]) / scale, most) : 0;
        const float expected = std::copysign(std::nearbyint(quotient), block[i]) * scale;
        ASSERT_EQ(read[i], expected) << block[i];
      }
    }
  }
}

TEST(WireBlocks, ErrorsAreSmall) {
  std::mt19937 rng(5);
  std::normal_distribution<float> normal;
  std::vector<float> chosen;  // the largest of 100 each
  for (int i = 0; i < 6400; ++i) {
    float most = 0;
    for (int j = 0; j < 100; ++j) {
      const float x = normal(rng) * std::exp(0.7f * normal(rng));
      if (std::abs(x) > std::abs(most)) most = x;
    }
    chosen.push_back(most);
  }
  double energy = 0;
  for (const float x : chosen) energy += static_cast<double>(x) * x;
  const std::pair<Values, double> limits[] = {
      {Values::int8, 1e-4}, {Values::int4, 0.02}, {Values::int2, 0.18}, {Values::sign, 0.25}};
  for (const auto& [values, limit] : limits) {
    const auto read = rounded(values, chosen);
    double error = 0;
    for (std::size_t i = 0; i < read.size(); ++i) error += std::pow(read[i] - chosen[i], 2.0);
    EXPECT_LT(error / energy, limit) << kValuesNames[static_cast<std::size_t>(values)];
  }
}

TEST(WireBlocks, WhatIsNotFiniteVotesNo) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    for (const Values values : kBlockEncodings) {
      std::vector<float> chunk(100, 1.0f);
      chunk[70] = bad;
      Bytes message;
      const auto envelope = envelope_of(100, values);
      const std::size_t lengths[] = {chunk.size()};
      EXPECT_EQ(pack_stretch(envelope, lengths, Vote::yes, chunk, message), Vote::no);
      std::vector<float> read(100);
      EXPECT_EQ(unpack_stretch(envelope, lengths, message, read), Vote::no);
      EXPECT_TRUE(same_bits(read, chunk));
      EXPECT_TRUE(std::ranges::all_of(read, [](float x) { return std::isfinite(x); }));

      auto entries = entries_at({3, 40, 50});
      entries.values[1] = bad;
      EXPECT_EQ(pack(envelope, Whole(envelope), Vote::yes, entries, message), Vote::no);
    }
  }
}

TEST(WireBlocks, ForeignScalesAreRefused) {
  for (const Values values : kBlockEncodings) {
    std::vector<float> chunk(3, 1.0f);
    Bytes message;
    const auto envelope = envelope_of(100, values);
    const std::size_t lengths[] = {chunk.size()};
    pack_stretch(envelope, lengths, Vote::yes, chunk, message);
    for (const unsigned scale : {0x7f80u, 0x7fc0u, 0xff80u, 0xffffu}) {
      store(message.data() + kHeader, static_cast<std::uint16_t>(scale));
      fix_checksum(message);
      EXPECT_THROW(unpack_stretch(envelope, lengths, message, chunk), WireError) << scale;
    }
  }
}

// ---- messages that are refused --------------------------------------------------------------

Bytes small_message(const Envelope& envelope) {
  auto entries = entries_at({0, 5, 6, 300, 20000, 59999});
  Bytes message;
  pack(envelope, Whole(envelope), Vote::yes, entries, message);
  return message;
}

const Envelope kExpected = [] {
  Envelope envelope = envelope_of(60000, Values::bf16);
  envelope.contents = 0x5eed;
  envelope.loss_scale = 1024;
  return envelope;
}();

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
    {"contents", 24, 4},
    {"count", 28, 4},
    {"payload length", 32, 8},
    {"loss scale", 40, 4},
    {"checksum", 44, 4},
};

TEST(WireHeader, HasThisLayout) {
  auto entries = entries_at({3, 300});
  entries.values = {1.0f, -2.0f};
  Bytes message;
  const Envelope envelope{.run = 0xa1a2a3a4,
                          .step = 0xb1b2b3b4b5b6b7b8,
                          .bucket = 0xc1c2c3c4,
                          .universe = 0xd1d2d3d4,
                          .values = Values::bf16,
                          .contents = 7,
                          .loss_scale = 1024};
  pack(envelope, Whole(envelope), Vote::yes, entries, message);
  const std::uint8_t expected[] = {'T',  'P',  'R',  '1',   // magic
                                   4,    1,    1,    1,     // version, kind, values, vote
                                   0xa4, 0xa3, 0xa2, 0xa1,  // run
                                   0xc4, 0xc3, 0xc2, 0xc1,  // bucket
                                   0xb8, 0xb7, 0xb6, 0xb5, 0xb4, 0xb3, 0xb2, 0xb1,  // step
                                   0xba, 0xc0, 0x84, 0x94,                          // contents
                                   2,    0,    0,    0,                             // count
                                   8,    0,    0,    0,    0,    0,    0,    0,     // payload
                                   0,    0,    0x80, 0x44};                         // loss scale
  // No piece is whole; k = 6 in 5 bits, 1, four zeros, 1, 3 and 40 in 6 bits each; two values.
  const std::uint8_t payload[] = {0, 0x26, 0x1c, 0x50, 0x80, 0x3f, 0x00, 0xc0};
  const auto bytes = std::span<const std::byte>(message);
  EXPECT_TRUE(same_bits(bytes.first(44), expected));
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
  const char* const others = "message: contents are not those expected: the ranks hand over ";
  EXPECT_TRUE(text_for([](Envelope& e) { e.universe = 9; }).starts_with(others));
  EXPECT_TRUE(text_for([](Envelope& e) { e.contents = 9; }).starts_with(others));
  EXPECT_EQ(text_for([](Envelope& e) { e.loss_scale = 2; }),
            "message: loss scale is 1024, expected 2: give all ranks the same scaler");
  EXPECT_EQ(text_for([](Envelope& e) { e.loss_scale = 0; }), "");  // not known here
  EXPECT_EQ(text_for([](Envelope& e) { e.values = Values::fp32; }),
            "message: values encoding is 1, expected 0");
  EXPECT_EQ(refusal(kExpected, std::span(message).first(12)),
            "message: length is 12, expected at least 48");
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

/// A sealed message that claims `count` entries, with these bytes for flags and indices. The bytes
/// of its values are zeros: in indices they would go on and on.
Bytes forged(const Envelope& envelope, std::uint32_t count, const std::vector<unsigned>& head) {
  SparseVector none;
  Bytes message;
  pack(envelope, Whole(envelope), Vote::yes, none, message);
  message.resize(kHeader);
  for (const unsigned byte : head) message.push_back(static_cast<std::byte>(byte));
  message.resize(message.size() + bytes_of(envelope.values, std::min(count, 20u)), std::byte{0});
  store(message.data() + 28, count);
  fix_length_and_checksum(message);
  return message;
}

TEST(WireRefusal, IndicesStayInTheUniverse) {
  const auto ten = envelope_of(10, Values::fp16);
  // k = 0: five zeros, then gaps in unary.
  EXPECT_EQ(refusal(ten, forged(ten, 2, {0, 0b0010'0000, 0b100000})), "");    // 0 and 8 more
  EXPECT_NE(refusal(ten, forged(ten, 2, {0, 0b0010'0000, 0b10000000})), "");  // 0 and 9 more
  EXPECT_EQ(refusal(ten, forged(ten, 1, {0, 0b0000'0000, 0b1000000})), "");   // 9
  EXPECT_EQ(refusal(ten, forged(ten, 1, {0, 0b0000'0000, 0b10000000})),       // 10
            "message: index 10, expected less than 10");
  // 2^32 and more must not wrap round to a small index. k = 31.
  const auto largest = envelope_of(kLargestUniverse, Values::fp16);
  EXPECT_EQ(refusal(largest, forged(largest, 1, {0, 0xdf, 0xff, 0xff, 0xff, 0x3f})),
            "message: index 4294967295, expected less than 4294967295");
  EXPECT_EQ(refusal(largest, forged(largest, 1, {0, 0x5f, 0xff, 0xff, 0xff, 0x7f})), "");
  EXPECT_NE(refusal(largest, forged(largest, 1, {0, 0x1f, 0x02, 0, 0, 0, 0})), "");
  // Nothing but zeros, to the end of the message.
  EXPECT_NE(refusal(largest, forged(largest, 1, {0, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})), "");
  EXPECT_NE(refusal(ten, forged(ten, 10, {0})), "");
}

TEST(WireRefusal, ALyingCountAllocatesNothing) {
  const auto refusal_of = [](const Envelope& envelope, const Bytes& message) -> std::string {
    SparseVector entries;
    try {
      unpack(envelope, Whole(envelope), message, entries);
    } catch (const WireError& error) {
      EXPECT_EQ(entries.indices.capacity(), 0u);
      EXPECT_EQ(entries.values.capacity(), 0u);
      return error.what();
    }
    return "";
  };
  const auto large = envelope_of(kLargestUniverse, Values::fp32);
  for (const std::uint32_t count : {1000u, 0x7fffffffu, 0xffffffffu}) {
    EXPECT_NE(refusal_of(large, forged(large, count, {0, 2, 3})), "");
  }
  EXPECT_EQ(refusal_of(large, forged(large, 21, {0, 2, 3})),
            "message: payload length is 83, expected at least 85 for 21 entries");
  EXPECT_EQ(refusal_of(large, forged(large, 1, {1})),
            "message: count is 1, expected 4294967295 to 4294967295");
  const auto ten = envelope_of(10, Values::fp32);
  EXPECT_EQ(refusal_of(ten, forged(ten, 11, std::vector<unsigned>(11))),
            "message: count is 11, expected at most 10");
}

TEST(WireRefusal, AStretchHasNoOtherLength) {
  const auto envelope = envelope_of(10, Values::bf16);
  Buffer<float> values(3, 1.0f);
  const std::size_t lengths[] = {3};
  Bytes good;
  pack_stretch(envelope, lengths, Vote::yes, values, good);
  for (std::size_t length = kHeader; length < kHeader + 12; ++length) {
    Bytes message = good;
    message.resize(length, std::byte{0});
    fix_length_and_checksum(message);
    if (length == good.size()) {
      EXPECT_EQ(unpack_stretch(envelope, lengths, message, values), Vote::yes);
    } else {
      EXPECT_THROW(unpack_stretch(envelope, lengths, message, values), WireError) << length;
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
    const std::size_t lengths[] = {1, 2};
    try {
      unpack_stretch(envelope, lengths, message, values);
    } catch (const WireError&) {
    }
  }

  std::mt19937 rng_{20261115};
  int accepted_ = 0, refused_ = 0;
};

// Half of them get a header that passes, so that the payload is really looked at.
TEST_F(WireFuzz, RandomBytesAreAMessageOrAnError) {
  for (int time = 0; time < kTimes; ++time) {
    const auto envelope =
        envelope_of(static_cast<Index>(1 + below(1000)), kEncodings[below(std::size(kEncodings))]);
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
    const auto envelope = envelope_of(60000, kEncodings[below(std::size(kEncodings))]);
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
  const auto ten = envelope_of(10, Values::fp32);
  auto outside = entries_at({3, 10});
  EXPECT_THROW(pack(ten, Whole(ten), Vote::yes, outside, out), std::invalid_argument);
  const Piece apart[] = {{0, 2}, {4, 10}}, beyond[] = {{0, 11}};
  auto between = entries_at({1, 3, 5});
  EXPECT_THROW(pack(ten, apart, Vote::yes, between, out), std::invalid_argument);
  EXPECT_THROW(pack(ten, beyond, Vote::yes, between, out), std::invalid_argument);
  auto uneven = entries_at({3, 4});
  uneven.values.pop_back();
  EXPECT_THROW(pack(ten, Whole(ten), Vote::yes, uneven, out), std::invalid_argument);
  Buffer<float> too_long(11, 0.0f);
  EXPECT_THROW(pack_stretch(ten, std::vector<std::size_t>{11}, Vote::yes, too_long, out),
               std::invalid_argument);
  auto entries = entries_at({3, 4});
  const auto unknown = envelope_of(10, static_cast<Values>(9));
  EXPECT_THROW(pack(unknown, Whole(unknown), Vote::yes, entries, out), std::invalid_argument);
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
