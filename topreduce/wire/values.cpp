#include "topreduce/wire/values.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "topreduce/wire/blocks.h"
#include "topreduce/wire/floats.h"
#include "topreduce/wire/little_endian.h"

namespace topreduce::wire {
namespace {

template <class Codec>
std::byte* encode_each(std::span<float> values, std::byte* out) {
  using Code = typename Codec::Code;
  for (float& value : values) value = Codec::round(value);
  for (std::size_t i = 0; i < values.size(); ++i) {
    store(out + i * sizeof(Code), Codec::narrow(values[i]));
  }
  return out + values.size() * sizeof(Code);
}

template <class Codec>
void decode_each(const std::byte* in, std::span<float> values) {
  using Code = typename Codec::Code;
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = Codec::widen(load<Code>(in + i * sizeof(Code)));
  }
}

// Calls `visit` with every block of a run.
template <class Visit>
void for_each_block(std::span<float> values, Visit&& visit) {
  for (std::size_t start = 0; start < values.size(); start += kBlockValues) {
    visit(values.subspan(start, std::min(kBlockValues, values.size() - start)));
  }
}

}  // namespace

std::size_t run_bytes(Values encoding, std::size_t count) {
  switch (encoding) {
    case Values::fp32: return 4 * count;
    case Values::bf16:
    case Values::fp16: return 2 * count;
    case Values::int8:
    case Values::int4:
    case Values::int2:
    case Values::sign: break;
    default:
      throw std::invalid_argument("values: no encoding has the number " +
                                  std::to_string(static_cast<int>(encoding)));
  }
  const unsigned bits = code_bits(encoding);
  const std::size_t rest = count % kBlockValues;
  return count / kBlockValues * block_bytes(bits, kBlockValues) +
         (rest > 0 ? block_bytes(bits, rest) : 0);
}

Vote encode_run(Values encoding, std::span<float> values, std::byte*& out) {
  switch (encoding) {
    case Values::fp32: out = encode_each<Fp32>(values, out); return Vote::yes;
    case Values::bf16: out = encode_each<Bf16>(values, out); return Vote::yes;
    case Values::fp16: out = encode_each<Fp16>(values, out); return Vote::yes;
    default: break;
  }
  Vote vote = Vote::yes;
  for_each_block(values, [&](std::span<float> block) {
    if (encode_block(encoding, block, out) == Vote::no) vote = Vote::no;
    out += block_bytes(code_bits(encoding), block.size());
  });
  return vote;
}

void decode_run(Values encoding, const std::byte* in, std::span<float> values) {
  switch (encoding) {
    case Values::fp32: return decode_each<Fp32>(in, values);
    case Values::bf16: return decode_each<Bf16>(in, values);
    case Values::fp16: return decode_each<Fp16>(in, values);
    default: break;
  }
  for_each_block(values, [&](std::span<float> block) {
    decode_block(encoding, in, block);
    in += block_bytes(code_bits(encoding), block.size());
  });
}

}  // namespace topreduce::wire
