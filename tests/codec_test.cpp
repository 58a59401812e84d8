// How values are rounded and coded, and gaps between indices: every kernel on every instruction set
// of this machine equals its scalar reference. What becomes of both together: wire_test.cpp.

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
#include "topreduce/wire/little_endian.h"
#include "topreduce/wire/payload.h"
#include "wire_bytes.h"

namespace topreduce::wire {
namespace {

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
  for (std::size_t i = 0; i < kValueFormatNames.size(); ++i) {
    all.push_back(&format_of(static_cast<ValueFormat>(i)));
  }
  return all;
}

// ---- formats -----------------------------------------------------------------------------------

// A row of formats.def that moves would change what is on the wire.
TEST(WireFormats, HaveTheseNumbersAndSizes) {
  struct Row {
    ValueFormat values;
    std::size_t number;
    const char* name;
    std::size_t bytes_of_64, bytes_of_3;
  };
  const Row rows[] = {
      {ValueFormat::fp32, 0, "fp32", 256, 12}, {ValueFormat::bf16, 1, "bf16", 128, 6},
      {ValueFormat::fp16, 2, "fp16", 128, 6},  {ValueFormat::int8, 3, "int8", 66, 5},
      {ValueFormat::int4, 4, "int4", 34, 4},   {ValueFormat::int2, 5, "int2", 18, 3},
      {ValueFormat::sign, 6, "sign", 10, 3}};
  ASSERT_EQ(std::size(rows), kValueFormatNames.size());
  for (const Row& row : rows) {
    const Format& format = format_of(row.values);
    EXPECT_EQ(static_cast<std::size_t>(row.values), row.number);
    EXPECT_EQ(format.name, row.name);
    EXPECT_EQ(kValueFormatNames[row.number], row.name);
    EXPECT_EQ(format.run_bytes(64), row.bytes_of_64);
    EXPECT_EQ(format.run_bytes(128), 2 * row.bytes_of_64);
    EXPECT_EQ(format.run_bytes(67), row.bytes_of_64 + row.bytes_of_3);
    EXPECT_EQ(format.run_bytes(0), 0);
    EXPECT_EQ(bits_per_value(row.values), static_cast<double>(row.bytes_of_64) / 8);
  }
  EXPECT_THROW(format_of(static_cast<ValueFormat>(kValueFormatNames.size())),
               std::invalid_argument);
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

// ---- rounding -------------------------------------------------------------------------------

/// What values read as after their journey.
std::vector<float> rounded(ValueFormat encoding, std::vector<float> values) {
  Bytes payload;
  const std::size_t lengths[] = {values.size()};
  std::vector<float> received(values.size());
  EXPECT_TRUE(encode_values(encoding, lengths, values, payload, values) ||
              values_per_scale(encoding) > 1);
  decode_values(encoding, lengths, payload, received);
  EXPECT_TRUE(equal_bits(received, values));
  return received;
}

float rounded(ValueFormat encoding, float value) {
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
  const auto bf16 = rounded(ValueFormat::bf16, values), fp16 = rounded(ValueFormat::fp16, values);
  int wrong = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float both[] = {bf16[i], fp16[i]};
    const float expected[] = {nearest(values[i], 7, -126, 0x1.fep127),
                              nearest(values[i], 10, -14, 65504)};
    if (equal_bits(both, expected)) continue;
    if (++wrong < 10) ADD_FAILURE() << std::hexfloat << values[i];
  }
  EXPECT_EQ(wrong, 0);
  // One by one they go through other code than many at once.
  for (std::size_t i = 0; i < values.size(); i += 97) {
    EXPECT_EQ(rounded(ValueFormat::bf16, values[i]), bf16[i]);
    EXPECT_EQ(rounded(ValueFormat::fp16, values[i]), fp16[i]);
  }
}

TEST(WireRounding, SaturatesSoThatTheRestStaysOwed) {
  constexpr float kMax = std::numeric_limits<float>::max();
  for (const float sign : {1.0f, -1.0f}) {
    EXPECT_EQ(rounded(ValueFormat::fp16, sign * 65519), sign * 65504);
    EXPECT_EQ(rounded(ValueFormat::fp16, sign * 65520), sign * 65504);
    EXPECT_EQ(rounded(ValueFormat::fp16, sign * 1e30f), sign * 65504);
    EXPECT_EQ(rounded(ValueFormat::fp16, sign * kMax), sign * 65504);
    EXPECT_EQ(rounded(ValueFormat::bf16, sign * kMax), sign * 0x1.fep127f);
    EXPECT_EQ(rounded(ValueFormat::fp32, sign * kMax), sign * kMax);
    EXPECT_EQ(rounded(ValueFormat::fp16, sign * 0x1p-24f), sign * 0x1p-24f);
    EXPECT_EQ(rounded(ValueFormat::fp16, sign * 0x1p-25f), 0);
  }
}

TEST(WireRounding, LetsInfinityAndNanThrough) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const ValueFormat values : {ValueFormat::fp32, ValueFormat::bf16, ValueFormat::fp16}) {
    EXPECT_EQ(rounded(values, kInfinity), kInfinity);
    EXPECT_EQ(rounded(values, -kInfinity), -kInfinity);
    for (const std::uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xffffffffu}) {
      EXPECT_TRUE(std::isnan(rounded(values, std::bit_cast<float>(bits))));
    }
  }
}

// ---- blocks that share a scale ----------------------------------------------------------------

constexpr ValueFormat kBlockEncodings[] = {ValueFormat::int8, ValueFormat::int4, ValueFormat::int2,
                                           ValueFormat::sign};

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
  for (const ValueFormat values : kBlockEncodings) {
    for (const auto& block : many_blocks()) {
      const auto read = rounded(values, block);
      for (std::size_t i = 0; i < block.size(); ++i) {
        ASSERT_TRUE(std::isfinite(read[i]));
        if (values == ValueFormat::sign) continue;
        const float owed = block[i] - read[i];
        const double exact = static_cast<double>(block[i]) - static_cast<double>(read[i]);
        ASSERT_EQ(static_cast<double>(owed), exact)
            << kValueFormatNames[static_cast<std::size_t>(values)] << std::hexfloat << " of "
            << block[i] << " as " << read[i];
      }
    }
  }
}

// The definition of int8 and int4, in plain words.
TEST(WireBlocks, AreTheNearestMultipleOfTheScale) {
  const auto& blocks = many_blocks();
  for (const auto& [values, most] :
       {std::pair(ValueFormat::int8, 127.0f), std::pair(ValueFormat::int4, 7.0f)}) {
    for (const auto& block : blocks) {
      float largest = 0;
      for (const float x : block) largest = std::max(largest, std::abs(x));
      const float scale = rounded(
          ValueFormat::bf16,
          std::min(largest / most, values == ValueFormat::int8 ? 0x1.fep120f : 0x1.fep124f));
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
  const std::pair<ValueFormat, double> limits[] = {{ValueFormat::int8, 1e-4},
                                                   {ValueFormat::int4, 0.02},
                                                   {ValueFormat::int2, 0.18},
                                                   {ValueFormat::sign, 0.25}};
  for (const auto& [values, limit] : limits) {
    const auto read = rounded(values, chosen);
    double error = 0;
    for (std::size_t i = 0; i < read.size(); ++i) error += std::pow(read[i] - chosen[i], 2.0);
    EXPECT_LT(error / energy, limit) << kValueFormatNames[static_cast<std::size_t>(values)];
  }
}

TEST(WireBlocks, WhatIsNotFiniteIsSaidAndBecomesZeros) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    for (const ValueFormat values : kBlockEncodings) {
      std::vector<float> chunk(100, 1.0f), read(100);
      chunk[70] = bad;
      Bytes payload;
      const std::size_t lengths[] = {chunk.size()};
      EXPECT_FALSE(encode_values(values, lengths, chunk, payload, chunk));
      decode_values(values, lengths, payload, read);
      EXPECT_TRUE(equal_bits(read, chunk));
      EXPECT_NE(read[0], 0.0f) << "another block";
      EXPECT_EQ(std::ranges::count(std::span(read).subspan(64), 0.0f), 36);

      const Piece whole[] = {{0, 100}};
      SparseVector entries;
      for (const Index index : {3u, 40u, 50u}) entries.push_back(index, index == 40 ? bad : 1.0f);
      EXPECT_FALSE(encode_entries(values, whole, entries, payload, entries));
    }
  }
}

TEST(WireBlocks, ForeignScalesAreRefused) {
  for (const ValueFormat values : kBlockEncodings) {
    std::vector<float> chunk(3, 1.0f);
    Bytes payload;
    const std::size_t lengths[] = {chunk.size()};
    encode_values(values, lengths, chunk, payload, chunk);
    for (const unsigned scale : {0x7f80u, 0x7fc0u, 0xff80u, 0xffffu}) {
      store(payload.data(), static_cast<std::uint16_t>(scale));
      EXPECT_THROW(decode_values(values, lengths, payload, chunk), WireError) << scale;
    }
  }
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

}  // namespace
}  // namespace topreduce::wire
