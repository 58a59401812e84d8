// int2: -1, 0, 1 times a scale; or, with the scale's sign bit set, 1, 2, -1, -2 for the codes 0, 1,
// 2, 3. Entries that were chosen for their size have no small ones among them and need no zero.

#include "topreduce/wire/formats/blocks.h"
#include "topreduce/wire/formats/format.h"

namespace topreduce::wire::formats {
namespace {

constexpr std::uint16_t kWithoutZero = 0x8000;  // in a scale: the sign bit

float without_zero(std::uint8_t code) {
  return static_cast<float>((1 + (code & 1)) * (1 - (code & 2)));
}

// Of bit patterns, which ascend as magnitudes do.
float smallest_of(const Block& magnitudes, std::size_t count) {
  std::array<std::uint32_t, 8> least;
  least.fill(bits_of(magnitudes[0]));
  for (std::size_t i = 0; i + 8 <= count; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) least[j] = std::min(least[j], bits_of(magnitudes[i + j]));
  }
  for (std::size_t i = count / 8 * 8; i < count; ++i) {
    least[0] = std::min(least[0], bits_of(magnitudes[i]));
  }
  return float_of(*std::ranges::min_element(least));
}

void encode_without_zero(const Block& values, const Block& magnitudes, float scale,
                         std::size_t count, std::byte* out, Block& rounded) {
  Codes codes{};
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned twice = magnitudes[i] > 1.5f * scale ? 1 : 0;
    codes[i] = static_cast<std::uint8_t>(twice | bits_of(values[i]) >> 31 << 1);
    rounded[i] = without_zero(codes[i]) * scale;
  }
  store(out, static_cast<std::uint16_t>(Bf16::narrow(scale) | kWithoutZero));
  pack_codes<2>(codes, count, out + 2);
}

bool encode_int2(std::span<const float> values, std::byte* out, float* rounded) {
  return encode_blocks<2>(values, out, rounded,
                          [](const Block& block, const Block& magnitudes, float largest,
                             std::size_t count, std::byte* to, Block& read) {
                            const float mean = std::min(mean_of(magnitudes, count), largest);
                            const float scale = scale_of<2>(0.875f * mean);
                            if (scale > 0 && smallest_of(magnitudes, count) >= 0.5f * scale) {
                              encode_without_zero(block, magnitudes, scale, count, to, read);
                            } else {
                              const float wider = scale_of<2>(1.5f * std::min(mean, 0x1p126f));
                              encode_multiples<2>(block, magnitudes, wider, count, to, read);
                            }
                          });
}

void decode_int2(const std::byte* in, std::span<float> values) {
  decode_blocks<2>(in, values, [](const std::byte* from, std::span<float> block) {
    const auto head = load<std::uint16_t>(from);
    const auto code = static_cast<std::uint16_t>(head & ~kWithoutZero);
    const float scale = read_scale<2>(code);
    if (code == head) return decode_multiples<2>(from, scale, block);
    Codes codes;
    unpack_codes<2>(from + 2, block.size(), codes);
    for (std::size_t i = 0; i < block.size(); ++i) block[i] = without_zero(codes[i]) * scale;
  });
}

}  // namespace

Codec int2() {
  return {encode_int2, decode_int2, encode_int2, decode_int2};
}

}  // namespace topreduce::wire::formats
