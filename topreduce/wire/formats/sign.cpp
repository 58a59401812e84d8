// sign: the mean magnitude of the block with the value's sign; 1, -1 for the codes 0, 1. It has no
// zero, so what is owed is rounded itself.

#include "topreduce/wire/formats/blocks.h"
#include "topreduce/wire/formats/format.h"

namespace topreduce::wire::formats {
namespace {

bool encode_sign(std::span<const float> values, std::byte* out, float* rounded) {
  return encode_blocks<1>(values, out, rounded,
                          [](const Block& block, const Block& magnitudes, float largest,
                             std::size_t count, std::byte* to, Block& read) {
                            const float scale =
                                scale_of<1>(std::min(mean_of(magnitudes, count), largest));
                            Codes codes;
                            for (std::size_t i = 0; i < kBlockValues; ++i) {
                              codes[i] = static_cast<std::uint8_t>(bits_of(block[i]) >> 31);
                              read[i] = codes[i] != 0 ? -scale : scale;
                            }
                            store(to, Bf16::narrow(scale));
                            pack_codes<1>(codes, count, to + 2);
                          });
}

void decode_sign(const std::byte* in, std::span<float> values) {
  decode_blocks<1>(in, values, [](const std::byte* from, std::span<float> block) {
    const float scale = read_scale<1>(load<std::uint16_t>(from));
    Codes codes;
    unpack_codes<1>(from + 2, block.size(), codes);
    for (std::size_t i = 0; i < block.size(); ++i) block[i] = codes[i] != 0 ? -scale : scale;
  });
}

}  // namespace

Codec sign() {
  return {encode_sign, decode_sign, encode_sign, decode_sign};
}

}  // namespace topreduce::wire::formats
