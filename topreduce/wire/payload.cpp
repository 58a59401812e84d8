// Stands in until the codec comes.
#include "topreduce/wire/payload.h"
#include "topreduce/wire/header.h"
#include <algorithm>
namespace topreduce::wire {
namespace { Envelope shim(Values f, Pieces p, std::size_t n) { Envelope e; e.values=f; e.universe = p.empty()?static_cast<Index>(n):p.back().end; return e; } }
bool encode_entries(Values format, Pieces pieces, const SparseVector& entries, Bytes& out, SparseVector& rounded) {
  rounded.assign(entries);
  return pack(shim(format,pieces,0), pieces, Vote::yes, rounded, out) != Vote::no;
}
void decode_entries(Values format, Pieces pieces, std::span<const std::byte> payload, SparseVector& entries) { unpack(shim(format,pieces,0), pieces, payload, entries); }
bool encode_values(Values format, std::span<const std::size_t> lengths, std::span<const float> values, Bytes& out, std::span<float> rounded) {
  std::ranges::copy(values, rounded.begin());
  return pack_stretch(shim(format,{},values.size()), lengths, Vote::yes, rounded, out) != Vote::no;
}
void decode_values(Values format, std::span<const std::size_t> lengths, std::span<const std::byte> payload, std::span<float> values) { unpack_stretch(shim(format,{},values.size()), lengths, payload, values); }
}
