#pragma once

#include <span>

#include "topreduce/exchange/channel.h"
#include "topreduce/exchange/task.h"

namespace topreduce::exchange {

/// Replaces `values`, which stand at `places` of `compensated` on every rank (all of them if empty,
/// so no index travels), with their sum over the ranks: each rank adds up a part of every parameter
/// in rank order and hands it round. Two rounds, the volume of a ring. `settled`, unless empty,
/// becomes what this rank settled by it: its rounded values and, in the part it owns, the rounding
/// of the sum. Parts follow parameters, so who owes that does not depend on the bucket cut.
Task all_reduce(Channel& channel, const CompensatedGradient& compensated,
                std::span<const Index> places, std::span<float> values, std::span<float> settled);

/// The same for values that have no places, in parts of even size. They travel in `format`, or in
/// 16 bits if that has scales: scales for many values would depend on the bucket cut.
Task all_reduce(Channel& channel, wire::ValueFormat format, std::span<float> values,
                std::span<float> settled);

}  // namespace topreduce::exchange
