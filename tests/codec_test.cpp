// The payload of a message: value formats, the code of indices, and both together. Every kernel on
// every instruction set of this machine equals its scalar reference.

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "topreduce/kernels/kernels.h"
#include "topreduce/wire/formats/format.h"
#include "topreduce/wire/gap_block.h"
#include "topreduce/wire/payload.h"
#include "topreduce/wire/rice.h"

namespace topreduce::wire {
namespace {

template <class A, class B>
bool equal_bits(const A& a, const B& b) {
  return std::ranges::equal(std::as_bytes(std::span(a)), std::as_bytes(std::span(b)));
}

void on_every_target(const std::function<void()>& body) {
  for (const char* target : kernels::targets()) {
    SCOPED_TRACE(target);
    kernels::use_target(target);
    body();
  }
  kernels::use_target("");
}

std::vector<const Format*> all_formats() {
  std::vector<const Format*> all;
  for (std::size_t i = 0; i < kValuesNames.size(); ++i) {
    all.push_back(&format_of(static_cast<Values>(i)));
  }
  return all;
}

// ---- formats -----------------------------------------------------------------------------------

// A row of formats.def that moves would change what is on the wire.
TEST(WireFormats, HaveTheseNumbersAndSizes) {
  struct Row {
    Values values;
    std::size_t number;
    const char* name;
    std::size_t bytes_of_64, bytes_of_3;
  };
  const Row rows[] = {{Values::fp32, 0, "fp32", 256, 12}, {Values::bf16, 1, "bf16", 128, 6},
                      {Values::fp16, 2, "fp16", 128, 6},  {Values::int8, 3, "int8", 66, 5},
                      {Values::int4, 4, "int4", 34, 4},   {Values::int2, 5, "int2", 18, 3},
                      {Values::sign, 6, "sign", 10, 3}};
  ASSERT_EQ(std::size(rows), kValuesNames.size());
  for (const Row& row : rows) {
    const Format& format = format_of(row.values);
    EXPECT_EQ(static_cast<std::size_t>(row.values), row.number);
    EXPECT_EQ(format.name, row.name);
    EXPECT_EQ(kValuesNames[row.number], row.name);
    EXPECT_EQ(format.run_bytes(64), row.bytes_of_64);
    EXPECT_EQ(format.run_bytes(128), 2 * row.bytes_of_64);
    EXPECT_EQ(format.run_bytes(67), row.bytes_of_64 + row.bytes_of_3);
    EXPECT_EQ(format.run_bytes(0), 0);
    EXPECT_EQ(bits_per_value(row.values), static_cast<double>(row.bytes_of_64) / 8);
  }
  EXPECT_THROW(format_of(static_cast<Values>(kValuesNames.size())), std::invalid_argument);
}

/// Like gradients, with a long tail, tiny, huge, and with all that is awkward.
std::vector<float> values_of(std::size_t count, unsigned seed) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kOdd[] = {0.0f,     kInfinity, std::numeric_limits<float>::quiet_NaN(),
                            1e-45f,   1e-40f,    std::numeric_limits<float>::max(),
                            65504.0f, 65520.0f,  0x1p-24f,
                            0x1p-25f, 0x1.8p-24f};
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  const float unit = seed % 3 == 2 ? std::ldexp(1.0f, static_cast<int>(rng() % 240) - 125) : 1;
  for (float& x : values) {
    x = normal(rng) * unit;
    if (seed % 4 == 1) x *= std::exp(2 * normal(rng));
    if (seed % 5 == 3 && rng() % 7 == 0) x = std::copysign(kOdd[rng() % std::size(kOdd)], x);
  }
  return values;
}

void expect_as_scalar(const Format& format, const std::vector<float>& values) {
  SCOPED_TRACE(std::string(format.name) + ", " + std::to_string(values.size()));
  const std::size_t bytes = format.run_bytes(values.size());
  // A byte behind the last one shows a writer that goes too far.
  std::vector<std::byte> want(bytes + 1, std::byte{0x5a}), got = want;
  std::vector<float> want_rounded(values.size()), got_rounded(values.size());
  const bool finite = format.scalar_encode(values, want.data(), want_rounded.data());
  EXPECT_EQ(format.encode(values, got.data(), got_rounded.data()), finite);
  ASSERT_EQ(got, want);
  ASSERT_TRUE(equal_bits(got_rounded, want_rounded));

  // In place, and moved down a little.
  std::vector<float> moved(values.size() + 3);
  for (const std::size_t by : {0u, 3u}) {
    std::ranges::copy(values, moved.begin() + static_cast<std::ptrdiff_t>(by));
    format.encode(std::span(moved).subspan(by, values.size()), got.data(), moved.data());
    ASSERT_EQ(got, want);
    ASSERT_TRUE(equal_bits(std::span(moved).first(values.size()), std::span(want_rounded)));
  }

  want.resize(bytes);  // without spare room, for the sanitizer
  want.shrink_to_fit();
  std::vector<float> read(values.size()), scalar_read(values.size());
  format.decode(want.data(), read);
  format.scalar_decode(want.data(), scalar_read);
  ASSERT_TRUE(equal_bits(read, want_rounded));
  ASSERT_TRUE(equal_bits(scalar_read, want_rounded));
}

TEST(WireFormats, EqualTheirScalarReference) {
  on_every_target([] {
    for (const Format* format : all_formats()) {
      unsigned seed = 0;
      for (std::size_t count = 0; count < 140; ++count) {
        expect_as_scalar(*format, values_of(count, ++seed));
      }
      for (int time = 0; time < 60; ++time) expect_as_scalar(*format, values_of(1000, ++seed));
    }
  });
}

// Any code reads alike, also those that no sender writes.
TEST(WireFormats, ReadAnyBytesAsTheirScalarReference) {
  std::mt19937 rng(8);
  on_every_target([&rng] {
    for (const Format* format : all_formats()) {
      for (int time = 0; time < 200; ++time) {
        const std::size_t count = rng() % 200;
        std::vector<std::byte> bytes(format->run_bytes(count));
        for (std::byte& byte : bytes) byte = static_cast<std::byte>(rng());
        std::vector<float> read(count), want(count);
        bool refused = false, refused_too = false;
        try {
          format->scalar_decode(bytes.data(), want);
        } catch (const WireError&) {
          refused = true;
        }
        try {
          format->decode(bytes.data(), read);
        } catch (const WireError&) {
          refused_too = true;
        }
        ASSERT_EQ(refused, refused_too);
        ASSERT_TRUE(refused || equal_bits(read, want)) << format->name;
      }
    }
  });
}

// ---- blocks of gaps ----------------------------------------------------------------------------

std::vector<Index> gaps_of(std::mt19937& rng, std::size_t count, unsigned bits) {
  std::vector<Index> gaps(count);
  for (Index& gap : gaps) gap = static_cast<Index>(rng() & ((1ull << bits) - 1)) >> rng() % 5;
  return gaps;
}

TEST(WireGaps, KernelsEqualTheirScalarReference) {
  std::mt19937 rng(4);
  on_every_target([&rng] {
    for (unsigned bits = 0; bits <= 24; ++bits) {
      const auto gaps = gaps_of(rng, kBlockGaps, bits);
      for (unsigned guess = 0; guess <= 22; ++guess) {
        ASSERT_EQ(best_parameter(gaps.data(), guess), scalar::best_parameter(gaps.data(), guess));
      }
      for (unsigned parameter = 0; parameter <= kMostParameter; ++parameter) {
        std::vector<std::byte> want(low_bytes(parameter)), got(low_bytes(parameter));
        scalar::pack_lows(gaps.data(), parameter, want.data());
        pack_lows(gaps.data(), parameter, got.data());
        ASSERT_EQ(got, want) << parameter;

        std::vector<std::uint32_t> ones(kBlockGaps);
        std::uint32_t place = 0;
        for (std::size_t j = 0; j < kBlockGaps; ++j) {
          place += gaps[j] >> parameter;
          ones[j] = place++;
        }
        std::vector<Index> indices(kBlockGaps), same(kBlockGaps);
        const Index first = static_cast<Index>(rng());
        const std::uint32_t sum =
            join_gaps(ones.data(), got.data(), parameter, first, indices.data());
        ASSERT_EQ(sum, scalar::join_gaps(ones.data(), got.data(), parameter, first, same.data()));
        ASSERT_EQ(indices, same);
        Index following = first;
        for (std::size_t j = 0; j < kBlockGaps; ++j) {
          ASSERT_EQ(indices[j], static_cast<Index>(following + gaps[j]));
          following = indices[j] + 1;
        }
      }
    }
  });
}

TEST(WireGaps, OnesAreFoundAsByTheScalarReference) {
  std::mt19937 rng(5);
  on_every_target([&rng] {
    for (int time = 0; time < 3000; ++time) {
      std::vector<std::byte> bytes(rng() % 100);
      for (std::byte& byte : bytes) {
        byte = static_cast<std::byte>(time % 3 == 0 ? rng() : rng() % 9 == 0 ? 1u << rng() % 8 : 0);
      }
      const std::uint64_t start = rng() % (8 * bytes.size() + 70);
      const std::size_t count = 1 + rng() % kBlockGaps;
      std::vector<std::uint32_t> want(count), got(count + kOnesSlack);
      const std::uint64_t end = scalar::find_ones(bytes, start, count, want.data());
      ASSERT_EQ(find_ones(bytes, start, count, got.data()), end);
      if (end == kNoOnes) continue;
      got.resize(count);
      ASSERT_EQ(got, want);
    }
  });
}

// ---- payloads ----------------------------------------------------------------------------------

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

/// Returns the payload.
Bytes expect_round_trip(Values format, const Model& model, const SparseVector& entries) {
  const SparseVector before = entries;
  Bytes out(3, std::byte{7});
  SparseVector rounded = before, read;  // is replaced
  const Encoded encoded = encode_entries(format, model.pieces, entries, out, rounded);
  EXPECT_TRUE(encoded.finite);
  EXPECT_TRUE(equal_bits(entries.indices, before.indices));
  EXPECT_TRUE(equal_bits(entries.values, before.values));
  EXPECT_LE(out.size(), 3 + largest_payload(entries.size(), model.pieces.size()));
  EXPECT_EQ(out[2], std::byte{7});
  const std::vector<std::byte> payload(out.begin() + 3, out.end());  // without spare room
  decode_entries(format, model.pieces, encoded.count, payload, read);
  EXPECT_TRUE(equal_bits(read.indices, rounded.indices));
  EXPECT_TRUE(equal_bits(read.values, rounded.values));
  if (format == Values::fp32 && encoded.count == entries.size()) {
    EXPECT_TRUE(equal_bits(rounded.values, before.values));
  }

  SparseVector in_place = before;
  Bytes again;
  encode_entries(format, model.pieces, in_place, again, in_place);
  EXPECT_TRUE(equal_bits(again, payload));
  EXPECT_TRUE(equal_bits(in_place.indices, rounded.indices));
  EXPECT_TRUE(equal_bits(in_place.values, rounded.values));
  return again;
}

class WirePayload : public testing::TestWithParam<std::string_view> {
 protected:
  static Values format() {
    const auto at = std::ranges::find(kValuesNames, GetParam());
    return static_cast<Values>(at - kValuesNames.begin());
  }
  std::mt19937 rng_{17};
};

INSTANTIATE_TEST_SUITE_P(Wire, WirePayload, testing::ValuesIn(kValuesNames),
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

TEST_P(WirePayload, KeepsHugeGapsInFullBlocks) {
  const Model model = one_piece(0xffffffff);
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

TEST_P(WirePayload, ValuesAtKnownPlacesArrive) {
  const std::size_t lengths[] = {70, 0, 1, 129, 1000};
  const auto values = values_of(1200, 1);
  Bytes out(1);
  std::vector<float> rounded(values.size()), read(values.size()), in_place = values;
  EXPECT_TRUE(encode_values(format(), lengths, values, out, rounded));
  const std::vector<std::byte> payload(out.begin() + 1, out.end());
  decode_values(format(), lengths, payload, read);
  EXPECT_TRUE(equal_bits(read, rounded));
  encode_values(format(), lengths, in_place, out, in_place);
  EXPECT_TRUE(equal_bits(in_place, rounded));
  EXPECT_THROW(decode_values(format(), lengths, std::span(payload).first(payload.size() - 1), read),
               WireError);
}

// Parameters, quotients and low bits, as if they were one string of bits.
TEST(WirePayloadSize, IndicesTakeNoByteMoreThanRiceCodes) {
  std::mt19937 rng(3);
  for (const Index universe : {300u, 5000u, 100'000u}) {
    for (const double density : {0.001, 0.01, 0.1, 0.5}) {
      const Model model = one_piece(universe);
      const SparseVector entries = entries_in(rng, model, density);
      Bytes out;
      SparseVector rounded;
      encode_entries(Values::fp32, model.pieces, entries, out, rounded);
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
      EXPECT_EQ(out.size(), 1 + (bits + 7) / 8 + 4 * entries.size()) << universe << ' ' << density;
    }
  }
}

/// Whether it is accepted; what it gives then must be entries.
bool accepted(Values format, const Model& model, std::size_t count,
              const std::vector<std::byte>& payload) {
  SparseVector read;
  try {
    decode_entries(format, model.pieces, count, payload, read);
  } catch (const WireError&) {
    return false;
  }
  EXPECT_EQ(read.indices.size(), read.values.size());
  EXPECT_LE(read.size(), count);
  EXPECT_EQ(std::ranges::adjacent_find(read.indices, std::greater_equal<>{}), read.indices.end());
  auto piece = model.pieces.begin();
  for (const Index index : read.indices) {
    while (piece != model.pieces.end() && piece->end <= index) ++piece;
    EXPECT_TRUE(piece != model.pieces.end() && piece->begin <= index);
  }
  return true;
}

TEST_P(WirePayload, DamagedOnesAreEntriesOrRefused) {
  const Model model{60000, {{0, 20000}, {20000, 20001}, {30000, 31000}, {31000, 60000}}};
  SparseVector entries = entries_in(rng_, model, 0.02), rounded;
  Bytes out;
  const std::size_t count = encode_entries(format(), model.pieces, entries, out, rounded).count;
  const std::vector<std::byte> good(out.begin(), out.end());
  ASSERT_TRUE(accepted(format(), model, count, good));
  for (std::size_t length = 0; length < good.size(); ++length) {
    const std::vector<std::byte> cut(good.begin(),
                                     good.begin() + static_cast<std::ptrdiff_t>(length));
    EXPECT_FALSE(accepted(format(), model, count, cut)) << length;
  }
  for (const std::size_t other : {std::size_t{0}, count - 1, count + 1, count + 300}) {
    EXPECT_FALSE(accepted(format(), model, other, good)) << other;
  }
  int refused = 0;
  for (int time = 0; time < 3000; ++time) {
    std::vector<std::byte> bad = good;
    for (std::size_t changes = 1 + rng_() % 3; changes > 0; --changes) {
      bad[rng_() % bad.size()] ^= static_cast<std::byte>(1 + rng_() % 255);
    }
    if (!accepted(format(), model, count, bad)) ++refused;
  }
  EXPECT_GT(refused, 100);
}

TEST(WirePayloadRefusal, FullBlocksHaveNoLargerParameter) {
  const Model model = one_piece(0xffffffff);
  std::vector<std::byte> payload(1 + 100 + 32 * 31 + 4 * 256, std::byte{0xff});
  payload[0] = std::byte{0};
  payload[1] = std::byte{25};
  SparseVector read;
  try {
    decode_entries(Values::fp32, model.pieces, 256, payload, read);
    FAIL();
  } catch (const WireError& error) {
    EXPECT_STREQ(error.what(), "message: parameter of a full block is 25, expected at most 24");
  }
  // 256 low parts of 24 bits, all ones, add up to 2^32 - 256: one more and indices would wrap
  // round.
  payload[1] = std::byte{0xf8};
  EXPECT_FALSE(accepted(Values::fp32, model, 256, payload));
}

TEST(WirePayloadRefusal, MistakesOfTheCallerChangeNothing) {
  const Piece apart[] = {{0, 2}, {4, 10}};
  SparseVector entries, rounded;
  for (const Index index : {1u, 3u, 5u}) entries.push_back(index, 1);
  Bytes out(5);
  EXPECT_THROW(encode_entries(Values::fp32, apart, entries, out, rounded), std::invalid_argument);
  entries.values.pop_back();
  EXPECT_THROW(encode_entries(Values::fp32, apart, entries, out, rounded), std::invalid_argument);
  EXPECT_EQ(out.size(), 5u);
}

}  // namespace
}  // namespace topreduce::wire
