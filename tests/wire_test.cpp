// Entries and values as bytes, and the seal before them: what is sent arrives, nothing takes more
// than it should, and any bytes at all are a message or a WireError.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "tiers.h"
#include "topreduce/wire/checksum.h"
#include "topreduce/wire/formats/format.h"
#include "topreduce/wire/little_endian.h"
#include "topreduce/wire/payload.h"
#include "wire_bytes.h"

namespace topreduce::wire {
namespace {

constexpr Index kLargestUniverse = 0xffffffff;
constexpr std::size_t kCountBytes = 4;

struct Model {
  Index universe;
  std::vector<Piece> pieces;
};

Model one_piece(Index universe) {
  return {universe, {{0, universe}}};
}

/// Pieces of odd sizes, some empty, some with room before them.
Model many_pieces(std::mt19937& rng, Index universe) {
  Model model{universe, {}};
  for (Index at = 0; at < universe;) {
    const auto below = [&rng](Index bound) { return static_cast<Index>(rng() % bound); };
    const Index begin = below(3) == 0 ? std::min(universe, at + below(20)) : at;
    const Index size = below(below(5) == 0 ? 3 : universe / 4 + 2);
    at = std::min(universe, begin + size);
    model.pieces.push_back({begin, at});
  }
  return model;
}

SparseVector entries_in(std::mt19937& rng, const Model& model, double density) {
  std::bernoulli_distribution chosen(density);
  std::normal_distribution<float> normal;
  SparseVector entries;
  for (const Piece& piece : model.pieces) {
    for (Index i = piece.begin; i < piece.end; ++i) {
      if (chosen(rng)) entries.push_back(i, normal(rng));
    }
  }
  return entries;
}

SparseVector entries_at(const std::vector<Index>& indices) {
  std::mt19937 rng(7);
  std::normal_distribution<float> normal;
  SparseVector entries;
  for (const Index index : indices) entries.push_back(index, normal(rng));
  return entries;
}

Bytes payload_of(ValueFormat format, const Model& model, SparseVector entries) {
  Bytes payload;
  encode_entries(format, model.pieces, entries, payload, entries);
  return payload;
}

std::uint32_t count_of(const Bytes& payload) {
  return load<std::uint32_t>(payload.data());
}

// ---- round trips -------------------------------------------------------------------------------

/// What is rounded away must be owed to the bit; sign has a tolerance.
void expect_owed(ValueFormat format, float original, float sent) {
  const float owed = original - sent;
  if (format != ValueFormat::sign) {
    EXPECT_EQ(sent + owed, original) << "the rounding is not owed exactly";
  } else {
    EXPECT_NEAR(sent + owed, original, 0x1p-23f * std::max(std::abs(sent), std::abs(original)));
  }
}

void expect_round_trip(ValueFormat format, const Model& model, const SparseVector& entries) {
  const SparseVector before = entries;
  Bytes out(3, std::byte{7});
  SparseVector rounded = before, read = entries_at({1, 2, 3});  // are replaced
  EXPECT_TRUE(encode_entries(format, model.pieces, entries, out, rounded));
  EXPECT_TRUE(equal_bits(entries.indices, before.indices));
  EXPECT_TRUE(equal_bits(entries.values, before.values));
  EXPECT_LE(out.size(), 3 + largest_payload(entries.size(), model.pieces.size()));
  EXPECT_EQ(out[2], std::byte{7});
  const std::vector<std::byte> payload(out.begin() + 3, out.end());  // without spare room
  decode_entries(format, model.pieces, payload, read);
  EXPECT_TRUE(equal_bits(read.indices, rounded.indices));
  EXPECT_TRUE(equal_bits(read.values, rounded.values)) << "settled is not what peers read";

  std::size_t next = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    const bool there = next < rounded.size() && rounded.indices[next] == before.indices[i];
    expect_owed(format, before.values[i], there ? rounded.values[next] : 0);
    next += there ? 1 : 0;
  }
  EXPECT_EQ(next, rounded.size()) << "entries that were not sent";

  SparseVector in_place = before;
  Bytes again;
  encode_entries(format, model.pieces, in_place, again, in_place);
  EXPECT_TRUE(equal_bits(again, payload));
  EXPECT_TRUE(equal_bits(in_place.indices, rounded.indices));
  EXPECT_TRUE(equal_bits(in_place.values, rounded.values));
}

class WirePayload : public testing::TestWithParam<std::string_view> {
 protected:
  static ValueFormat format() {
    const auto at = std::ranges::find(kValueFormatNames, GetParam());
    return static_cast<ValueFormat>(at - kValueFormatNames.begin());
  }
  static std::size_t run_bytes(std::size_t count) { return format_of(format()).run_bytes(count); }

  std::mt19937 rng_{17};
};

INSTANTIATE_TEST_SUITE_P(Wire, WirePayload, testing::ValuesIn(kValueFormatNames),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(WirePayload, KeepsEntriesOfAllDensities) {
  for (const double density : {0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.98, 1.0}) {
    SCOPED_TRACE(density);
    for (const Index universe : {0u, 1u, 7u, 255u, 256u, 257u, 511u, 513u, 5003u, 40001u}) {
      const Model whole = one_piece(universe), cut = many_pieces(rng_, universe);
      expect_round_trip(format(), whole, entries_in(rng_, whole, density));
      expect_round_trip(format(), cut, entries_in(rng_, cut, density));
    }
  }
}

// Some pieces full, some filled with zeros, some listed, in one payload.
TEST_P(WirePayload, KeepsMixedPieces) {
  const Model model{9000, {{0, 1000}, {1000, 1000}, {1000, 3000}, {3010, 5000}, {5000, 9000}}};
  constexpr double kDensities[] = {1.0, 0.95, 0.1, 0.9, 0.02};
  for (std::size_t turn = 0; turn < 5; ++turn) {
    SparseVector entries;
    for (std::size_t p = 0; p < model.pieces.size(); ++p) {
      const Model piece{9000, {model.pieces[p]}};
      const SparseVector part = entries_in(rng_, piece, kDensities[(p + turn) % 5]);
      for (std::size_t i = 0; i < part.size(); ++i) {
        // Some become zero in a piece that is filled.
        entries.push_back(part.indices[i], part.values[i] * (i % 7 == 0 ? 1e-30f : 1.0f));
      }
    }
    expect_round_trip(format(), model, entries);
  }
}

TEST_P(WirePayload, KeepsGapsOfAllLengths) {
  const Model model = one_piece(kLargestUniverse);
  const auto expect_kept = [&](const std::vector<Index>& indices) {
    expect_round_trip(format(), model, entries_at(indices));
  };
  for (unsigned bits = 0; bits < 32; ++bits) {
    for (const std::uint64_t gap : {(1ull << bits) - 1, 1ull << bits, (1ull << bits) + 1}) {
      if (2 + gap + 1 >= kLargestUniverse) continue;
      expect_kept({2, static_cast<Index>(2 + gap + 1)});
    }
  }
  expect_kept({kLargestUniverse - 1});
  expect_kept({0, kLargestUniverse - 2, kLargestUniverse - 1});
  std::vector<Index> all, crowded;
  for (std::uint64_t index = 0; index < kLargestUniverse; index += 1 + (index >> 6)) {
    all.push_back(static_cast<Index>(index));
  }
  expect_kept(all);
  // Gaps of zero and one far away, in every place of a block.
  for (Index i = 0; i < 700; ++i) crowded.push_back(i < 300 ? i : kLargestUniverse - 1000 + i);
  expect_kept(crowded);
}

TEST_P(WirePayload, KeepsHugeGapsInFullBlocks) {
  const Model model = one_piece(kLargestUniverse);
  for (const Index step : {1u, 2u, 1000u, 1u << 20, 1u << 23}) {
    for (const std::size_t jump : {0u, 1u, 100u, 255u, 256u, 300u}) {
      SparseVector entries;
      std::uint64_t at = 0;
      for (std::size_t i = 0; i < 600; ++i, at += step) {
        if (i == jump) at += 0x80000000;
        if (at >= model.universe) break;
        entries.push_back(static_cast<Index>(at), static_cast<float>(i) + 1);
      }
      expect_round_trip(format(), model, entries);
    }
  }
  SparseVector spread;  // the largest parameter of a full block
  for (std::uint64_t i = 0; i < 256; ++i)
    spread.push_back(static_cast<Index>(i << 24 | 0xfffffe), 1);
  expect_round_trip(format(), model, spread);
}

// How a piece is rounded does not depend on what else is in the message.
TEST_P(WirePayload, PiecesAreRoundedAlone) {
  const Model model{1000, {{0, 70}, {70, 500}, {500, 1000}}};
  for (const double density : {0.1, 0.7, 0.9, 1.0}) {
    SparseVector together = entries_in(rng_, model, density), joined;
    const SparseVector alone = together;
    Bytes out;
    encode_entries(format(), model.pieces, together, out, together);
    for (const Piece& piece : model.pieces) {
      SparseVector part;
      for (std::size_t i = 0; i < alone.size(); ++i) {
        if (alone.indices[i] < piece.begin || alone.indices[i] >= piece.end) continue;
        part.push_back(alone.indices[i], alone.values[i]);
      }
      encode_entries(format(), {&piece, 1}, part, out, part);
      for (std::size_t i = 0; i < part.size(); ++i) {
        joined.push_back(part.indices[i], part.values[i]);
      }
    }
    EXPECT_TRUE(equal_bits(joined.indices, together.indices));
    EXPECT_TRUE(equal_bits(joined.values, together.values));
  }
}

TEST_P(WirePayload, ValuesAtKnownPlacesArrive) {
  std::normal_distribution<float> normal;
  for (const std::size_t count : {0u, 1u, 7u, 1000u, 1200u}) {
    const std::size_t lengths[] = {count / 3, 0, count - count / 3};
    std::vector<float> values(count), rounded(count), read(count);
    for (float& value : values) value = normal(rng_);
    std::vector<float> in_place = values;
    Bytes out(1);
    EXPECT_TRUE(encode_values(format(), lengths, values, out, rounded));
    const std::vector<std::byte> payload(out.begin() + 1, out.end());  // without spare room
    EXPECT_EQ(payload.size(), run_bytes(lengths[0]) + run_bytes(lengths[2]));
    decode_values(format(), lengths, payload, read);
    EXPECT_TRUE(equal_bits(read, rounded));
    encode_values(format(), lengths, in_place, out, in_place);
    EXPECT_TRUE(equal_bits(in_place, rounded));

    std::vector<float> longer(count + 64);
    EXPECT_THROW(decode_values(format(), std::vector{count + 64}, payload, longer), WireError);
  }
}

TEST_P(WirePayload, ValuesHaveNoOtherLength) {
  const std::size_t lengths[] = {3};
  std::vector<float> values(3, 1.0f);
  Bytes good;
  encode_values(format(), lengths, values, good, values);
  for (std::size_t length = 0; length < good.size() + 9; ++length) {
    Bytes payload = good;
    payload.resize(length, std::byte{0});
    const auto read = [&] { decode_values(format(), lengths, payload, values); };
    if (length == good.size()) {
      EXPECT_NO_THROW(read());
    } else {
      EXPECT_THROW(read(), WireError) << length;
    }
  }
}

TEST_P(WirePayload, AppendsWithoutMovingWhatIsThere) {
  const Model model = one_piece(1000);
  SparseVector first = entries_at({1, 200, 999}), second = entries_in(rng_, model, 0.5), read;
  Bytes out;
  out.reserve(largest_payload(first.size(), 1) + largest_payload(second.size(), 1));
  const std::byte* const place = out.data();
  encode_entries(format(), model.pieces, first, out, first);
  const std::size_t border = out.size();
  encode_entries(format(), model.pieces, second, out, second);
  EXPECT_EQ(out.data(), place) << "largest_payload was not enough";

  const auto bytes = std::span<const std::byte>(out);
  decode_entries(format(), model.pieces, bytes.first(border), read);
  EXPECT_TRUE(equal_bits(read.values, first.values));
  decode_entries(format(), model.pieces, bytes.subspan(border), read);
  EXPECT_TRUE(equal_bits(read.values, second.values));
}

// ---- sizes -------------------------------------------------------------------------------------

// Whatever is sent: no more than all of it, the count, and two bits for every piece.
TEST_P(WirePayload, IsNeverLargerThanDense) {
  if (!format_of(format()).has_zero) return;  // see docs/wire.md
  for (const Index universe : {1u, 7u, 64u, 500u, 30000u}) {
    const Model model = one_piece(universe);
    for (int percent = 0; percent <= 100; ++percent) {
      const Bytes payload = payload_of(format(), model, entries_in(rng_, model, percent / 100.0));
      EXPECT_LE(payload.size(), kCountBytes + 2 + run_bytes(universe)) << percent;
    }
  }
}

// Parameters, quotients and low bits, as if they were one string of bits.
TEST(WirePayloadSize, IndicesTakeNoByteMoreThanRiceCodes) {
  std::mt19937 rng(3);
  for (const Index universe : {300u, 5000u, 100'000u}) {
    for (const double density : {0.001, 0.01, 0.1, 0.5}) {
      const Model model = one_piece(universe);
      const SparseVector entries = entries_in(rng, model, density);
      std::uint64_t bits = 0;
      for (std::size_t start = 0; start < entries.size(); start += 256) {
        const std::size_t end = std::min<std::size_t>(start + 256, entries.size());
        std::uint64_t least = ~std::uint64_t{0};
        for (unsigned k = 0; k < 32; ++k) {
          std::uint64_t block = 5;
          for (std::size_t i = start; i < end; ++i) {
            const Index gap = entries.indices[i] - (i > 0 ? entries.indices[i - 1] + 1 : 0);
            block += (gap >> k) + 1 + k;
          }
          least = std::min(least, block);
        }
        bits += least;
      }
      EXPECT_EQ(payload_of(ValueFormat::fp32, model, entries).size(),
                kCountBytes + 1 + (bits + 7) / 8 + 4 * entries.size())
          << universe << ' ' << density;
    }
  }
}

TEST(WireSize, AnIndexTakesItsEntropyAndLittleMore) {
  std::mt19937 rng(3);
  const auto expect_near_entropy = [&rng](Index universe, double density) {
    const Model model = one_piece(universe);
    const SparseVector entries = entries_in(rng, model, density);
    const auto count = static_cast<double>(entries.size());
    const double p = count / universe;
    const double entropy = -std::log2(p) - (1 - p) / p * std::log2(1 - p);
    const std::size_t indices =
        payload_of(ValueFormat::bf16, model, entries).size() - kCountBytes - 1 - 2 * entries.size();
    EXPECT_LE(static_cast<double>(8 * indices) / count, entropy + 0.15) << density;
  };
  expect_near_entropy(2'000'000, 0.01);
  expect_near_entropy(20'000'000, 0.001);
}

// ---- payloads that are refused -----------------------------------------------------------------

/// The text of the WireError; empty if the payload is accepted, and then it must give entries.
std::string refusal(ValueFormat format, const Model& model, std::span<const std::byte> payload) {
  // A copy without spare room, so that the sanitizer sees a reader that runs over the end.
  const std::vector<std::byte> exact(payload.begin(), payload.end());
  SparseVector read;
  try {
    decode_entries(format, model.pieces, exact, read);
  } catch (const WireError& error) {
    return error.what();
  }
  EXPECT_EQ(read.indices.size(), read.values.size());
  EXPECT_EQ(std::ranges::adjacent_find(read.indices, std::greater_equal<>{}), read.indices.end());
  auto piece = model.pieces.begin();
  for (const Index index : read.indices) {
    while (piece != model.pieces.end() && piece->end <= index) ++piece;
    EXPECT_TRUE(piece != model.pieces.end() && piece->begin <= index);
  }
  return "";
}

TEST_P(WirePayload, DamagedOnesAreEntriesOrRefused) {
  const Model model{60000, {{0, 20000}, {20000, 20001}, {30000, 31000}, {31000, 60000}}};
  const Bytes good = payload_of(format(), model, entries_in(rng_, model, 0.02));
  const std::uint32_t count = count_of(good);
  ASSERT_EQ(refusal(format(), model, good), "");
  for (std::size_t length = 0; length < good.size(); ++length) {
    EXPECT_NE(refusal(format(), model, std::span(good).first(length)), "") << length;
  }
  for (const std::uint32_t other : {0u, count - 1, count + 1, count + 300}) {
    Bytes bad = good;
    store(bad.data(), other);
    EXPECT_NE(refusal(format(), model, bad), "") << other;
  }
  int refused = 0;
  for (int time = 0; time < 3000; ++time) {
    Bytes bad = good;
    for (std::size_t changes = 1 + rng_() % 3; changes > 0; --changes) {
      bad[rng_() % bad.size()] ^= static_cast<std::byte>(1 + rng_() % 255);
    }
    if (!refusal(format(), model, bad).empty()) ++refused;
  }
  EXPECT_GT(refused, 100);
}

/// A payload that claims `count` values, with these bytes for flags and indices. The bytes of its
/// values are zeros: in indices they would go on and on.
Bytes forged(ValueFormat format, std::uint32_t count, const std::vector<unsigned>& head) {
  Bytes payload(kCountBytes);
  store(payload.data(), count);
  for (const unsigned byte : head) payload.push_back(static_cast<std::byte>(byte));
  payload.resize(payload.size() + format_of(format).run_bytes(std::min(count, 20u)), std::byte{0});
  return payload;
}

TEST(WirePayloadRefusal, IndicesStayInTheUniverse) {
  const auto refusal_of = [](Index universe, std::uint32_t count,
                             const std::vector<unsigned>& head) {
    return refusal(ValueFormat::fp16, one_piece(universe), forged(ValueFormat::fp16, count, head));
  };
  // k = 0: five zeros, then gaps in unary.
  EXPECT_EQ(refusal_of(10, 2, {0, 0b0010'0000, 0b100000}), "");    // 0 and 8 more
  EXPECT_NE(refusal_of(10, 2, {0, 0b0010'0000, 0b10000000}), "");  // 0 and 9 more
  EXPECT_EQ(refusal_of(10, 1, {0, 0b0000'0000, 0b1000000}), "");   // 9
  EXPECT_EQ(refusal_of(10, 1, {0, 0b0000'0000, 0b10000000}),       // 10
            "message: index 10, expected less than 10");
  EXPECT_NE(refusal_of(10, 10, {0}), "");
  // 2^32 and more must not wrap round to a small index. k = 31.
  constexpr Index kMost = kLargestUniverse;
  EXPECT_EQ(refusal_of(kMost, 1, {0, 0xdf, 0xff, 0xff, 0xff, 0x3f}),
            "message: index 4294967295, expected less than 4294967295");
  EXPECT_EQ(refusal_of(kMost, 1, {0, 0x5f, 0xff, 0xff, 0xff, 0x7f}), "");
  EXPECT_NE(refusal_of(kMost, 1, {0, 0x1f, 0x02, 0, 0, 0, 0}), "");
  // Nothing but zeros, to the end of the payload.
  EXPECT_NE(refusal_of(kMost, 1, {0, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}), "");
}

TEST(WirePayloadRefusal, FullBlocksHaveNoLargerParameter) {
  const Model model = one_piece(kLargestUniverse);
  Bytes payload(kCountBytes + 1 + 100 + 32 * 31 + 4 * 256, std::byte{0xff});
  store(payload.data(), std::uint32_t{256});
  payload[kCountBytes] = std::byte{0};
  payload[kCountBytes + 1] = std::byte{25};
  EXPECT_EQ(refusal(ValueFormat::fp32, model, payload),
            "message: parameter of a full block is 25, expected at most 24");
  // 256 low parts of 24 bits, all ones, add up to 2^32 - 256: one more and indices would wrap
  // round.
  payload[kCountBytes + 1] = std::byte{0xf8};
  EXPECT_NE(refusal(ValueFormat::fp32, model, payload), "");
}

TEST(WirePayloadRefusal, ALyingCountAllocatesNothing) {
  const auto refusal_of = [](Index universe, const Bytes& payload) -> std::string {
    SparseVector entries;
    try {
      decode_entries(ValueFormat::fp32, one_piece(universe).pieces, payload, entries);
    } catch (const WireError& error) {
      EXPECT_EQ(entries.indices.capacity(), 0u);
      EXPECT_EQ(entries.values.capacity(), 0u);
      return error.what();
    }
    return "";
  };
  for (const std::uint32_t count : {1000u, 0x7fffffffu, 0xffffffffu}) {
    EXPECT_NE(refusal_of(kLargestUniverse, forged(ValueFormat::fp32, count, {0, 2, 3})), "");
  }
  EXPECT_EQ(refusal_of(kLargestUniverse, forged(ValueFormat::fp32, 21, {0, 2, 3})),
            "message: payload length is 87, expected at least 89 for 21 entries");
  EXPECT_EQ(refusal_of(kLargestUniverse, forged(ValueFormat::fp32, 1, {1})),
            "message: count is 1, expected 4294967295 to 4294967295");
  EXPECT_EQ(refusal_of(10, forged(ValueFormat::fp32, 11, std::vector<unsigned>(11))),
            "message: count is 11, expected 0 to 10");
  EXPECT_EQ(refusal_of(10, Bytes(4)), "message: payload length is 4, expected at least 5");
}

TEST(WirePayloadRefusal, MistakesOfTheCallerChangeNothing) {
  const Piece ten[] = {{0, 10}}, apart[] = {{0, 2}, {4, 10}};
  Bytes out(5);
  const auto expect_refused = [&out](ValueFormat format, Pieces pieces,
                                     const SparseVector& entries) {
    SparseVector rounded;
    EXPECT_THROW(encode_entries(format, pieces, entries, out, rounded), std::invalid_argument);
    EXPECT_EQ(out.size(), 5u);
  };
  expect_refused(ValueFormat::fp32, ten, entries_at({3, 10}));
  expect_refused(ValueFormat::fp32, apart, entries_at({1, 3, 5}));
  auto uneven = entries_at({3, 4});
  uneven.values.pop_back();
  expect_refused(ValueFormat::fp32, ten, uneven);
  expect_refused(static_cast<ValueFormat>(kValueFormatNames.size()), ten, entries_at({3, 4}));
}

// ---- seals -------------------------------------------------------------------------------------

constexpr std::uint32_t kRound = 5;
const Identity kExpected{.origin = 0x123456789abcdef0, .contents = 0x5eed};
const Model kSmall = one_piece(60000);

Bytes small_payload(ValueFormat format) {
  return payload_of(format, kSmall, entries_at({0, 5, 6, 300, 20000, 59999}));
}

/// The text of the WireError; empty if the message is accepted.
std::string refusal(const Identity& expected, std::uint32_t round,
                    std::span<const std::byte> message) {
  const std::vector<std::byte> exact(message.begin(), message.end());
  try {
    return refusal(ValueFormat::bf16, kSmall, open(expected, round, exact));
  } catch (const WireError& error) {
    return error.what();
  }
}

TEST(WireSeal, HasThisLayout) {
  SparseVector entries;
  entries.push_back(3, 1.0f);
  entries.push_back(300, -2.0f);
  // The count; no piece is whole; k = 6 in 5 bits, 1, four zeros, 1, 3 and 40 in 6 bits each; two
  // values.
  const std::uint8_t expected[] = {2, 0, 0, 0, 0, 0x26, 0x1c, 0x50, 0x80, 0x3f, 0x00, 0xc0};
  const Bytes payload = payload_of(ValueFormat::bf16, one_piece(0xd1d2d3d4), entries);
  EXPECT_TRUE(equal_bits(payload, expected));
  const Bytes message = sealed(kExpected, kRound, payload);
  const std::uint8_t seal[] = {0x43, 0x3c, 0x37, 0xca, 0x96, 0xe9};  // contents, checksum
  EXPECT_TRUE(equal_bits(std::span(message).first(kSealBytes), seal));
  EXPECT_TRUE(equal_bits(std::span(message).subspan(kSealBytes), payload));
}

TEST(WireSeal, TellsDamageFromDisagreement) {
  const Bytes message = sealed(kExpected, kRound, small_payload(ValueFormat::bf16));
  const auto text_for = [&](auto change) {
    Identity other = kExpected;
    std::uint32_t round = kRound;
    change(other, round);
    return refusal(other, round, message);
  };
  EXPECT_EQ(text_for([](Identity&, std::uint32_t&) {}), "");
  EXPECT_EQ(text_for([](Identity& identity, std::uint32_t&) { identity.contents = 9; }),
            std::string("message: contents are not those expected: ") + Identity().disagreement);
  EXPECT_EQ(text_for([](Identity& identity, std::uint32_t&) {
              identity.contents = 9;
              identity.disagreement = "other rows";
            }),
            "message: contents are not those expected: other rows");
  const char* const damaged = "message: wrong checksum; the message was damaged on its way";
  EXPECT_EQ(text_for([](Identity& identity, std::uint32_t&) { ++identity.origin; }), damaged);
  EXPECT_EQ(text_for([](Identity&, std::uint32_t& round) { ++round; }), damaged);
  EXPECT_EQ(refusal(kExpected, kRound, std::span(message).first(5)),
            "message: length is 5, expected at least 6");
}

TEST(WireSeal, EveryFlippedByteIsFound) {
  const Bytes good = sealed(kExpected, kRound, small_payload(ValueFormat::bf16));
  for (std::size_t i = 0; i < good.size(); ++i) {
    for (unsigned flip = 1; flip < 256; ++flip) {
      Bytes bad = good;
      bad[i] ^= static_cast<std::byte>(flip);
      EXPECT_NE(refusal(kExpected, kRound, bad), "") << "byte " << i << " flip " << flip;
    }
  }
}

TEST(WireSeal, EveryOtherLengthIsFound) {
  const Bytes payload = small_payload(ValueFormat::bf16);
  const Bytes good = sealed(kExpected, kRound, payload);
  for (std::size_t length = 0; length < good.size(); ++length) {
    EXPECT_NE(refusal(kExpected, kRound, std::span(good).first(length)), "") << length;
  }
  for (std::size_t length = 0; length < payload.size(); ++length) {
    const Bytes cut = sealed(kExpected, kRound, std::span(payload).first(length));
    EXPECT_NE(refusal(kExpected, kRound, cut), "") << length << " bytes, sealed";
  }
  Bytes longer = good, longer_payload = payload;
  longer.push_back(std::byte{0});
  longer_payload.push_back(std::byte{0});
  EXPECT_NE(refusal(kExpected, kRound, longer), "");
  EXPECT_NE(refusal(kExpected, kRound, sealed(kExpected, kRound, longer_payload)), "");
}

TEST(WireChecksum, IsXxh64) {
  const auto hash = [](std::string_view text) { return xxh64(std::as_bytes(std::span(text)), 0); };
  EXPECT_EQ(hash(""), 0xef46db3751d8e999u);
  EXPECT_EQ(hash("a"), 0xd24ec4f1a98c6e5bu);
  EXPECT_EQ(hash("abc"), 0x44bc2cf5ad770999u);
  EXPECT_EQ(hash("Nobody inspects the spammish repetition"), 0xfbcea83c8a378bf1u);
  EXPECT_EQ(hash("The quick brown fox jumps over the lazy dog"), 0x0b242d361fda71bcu);
}

// ---- any bytes at all --------------------------------------------------------------------------

class WireFuzz : public testing::Test {
 protected:
  const int kTimes = kLong ? 200'000 : 100'000;

  std::size_t below(std::size_t bound) {
    return std::uniform_int_distribution<std::size_t>(0, bound - 1)(rng_);
  }
  std::byte any_byte() { return static_cast<std::byte>(below(256)); }
  ValueFormat any_format() { return static_cast<ValueFormat>(below(kValueFormatNames.size())); }

  /// As a message, and as the payload of one that is sealed right.
  void try_bytes(ValueFormat format, const Model& model, const Bytes& bytes) {
    EXPECT_THROW(open(kExpected, kRound, bytes), WireError);
    const Bytes message = sealed(kExpected, kRound, bytes);
    const auto payload = open(kExpected, kRound, message);
    ++(refusal(format, model, payload).empty() ? accepted_ : refused_);
    float values[3];
    const std::size_t lengths[] = {1, 2};
    try {
      decode_values(format, lengths, payload, values);
    } catch (const WireError&) {
    }
  }

  std::mt19937 rng_{20261115};
  int accepted_ = 0, refused_ = 0;
};

// Half of them claim few values, so that more than the count is looked at.
TEST_F(WireFuzz, RandomBytesAreAMessageOrAnError) {
  for (int time = 0; time < kTimes; ++time) {
    Bytes payload;
    if (time % 2 == 0) {
      payload.resize(kCountBytes);
      store(payload.data(), static_cast<std::uint32_t>(below(6)));
    }
    for (std::size_t left = below(time % 2 == 0 ? 20 : 120); left > 0; --left) {
      payload.push_back(any_byte());
    }
    try_bytes(any_format(), one_piece(static_cast<Index>(1 + below(1000))), payload);
  }
  EXPECT_GT(accepted_, 100);
  EXPECT_GT(refused_, kTimes / 2);
}

TEST_F(WireFuzz, ChangedMessagesAreAMessageOrAnError) {
  for (int time = 0; time < kTimes; ++time) {
    const ValueFormat format = any_format();
    Bytes payload = small_payload(format);
    for (std::size_t changes = 1 + below(4); changes > 0; --changes) {
      const std::size_t at = below(payload.size());
      switch (below(4)) {
        case 0: payload[at] = any_byte(); break;
        case 1: payload[at] ^= static_cast<std::byte>(1u << below(8)); break;
        case 2:
          payload.insert(payload.begin() + static_cast<std::ptrdiff_t>(at), any_byte());
          break;
        case 3: payload.erase(payload.begin() + static_cast<std::ptrdiff_t>(at)); break;
      }
    }
    try_bytes(format, kSmall, payload);
  }
  EXPECT_GT(accepted_, 100);
  EXPECT_GT(refused_, kTimes / 2);
}

}  // namespace
}  // namespace topreduce::wire
