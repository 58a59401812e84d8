#pragma once
#include "topreduce/wire/message.h"
namespace topreduce::wire {
bool encode_entries(Values format, Pieces pieces, const SparseVector& entries, Bytes& out, SparseVector& rounded);
void decode_entries(Values format, Pieces pieces, std::span<const std::byte> payload, SparseVector& entries);
bool encode_values(Values format, std::span<const std::size_t> lengths, std::span<const float> values, Bytes& out, std::span<float> rounded);
void decode_values(Values format, std::span<const std::size_t> lengths, std::span<const std::byte> payload, std::span<float> values);
}
