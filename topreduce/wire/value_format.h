#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace topreduce::wire {

/// How a value travels. Packing rounds to it, so that what a rank settles is what its peers read.
enum class ValueFormat : std::uint8_t {
#define FORMAT(name, ...) name,
#include "topreduce/wire/formats.def"
#undef FORMAT
};

inline constexpr auto kValueFormatNames = std::to_array<std::string_view>({
#define FORMAT(name, ...) #name,
#include "topreduce/wire/formats.def"
#undef FORMAT
});

/// Values that share a scale, in this format; 1 if each stands for itself.
std::size_t values_per_scale(ValueFormat format);
/// The format for values that no parameter places or nobody remembers the rounding of: 16 bits at
/// least, each value for itself.
ValueFormat without_scales(ValueFormat format);
/// Bits that a value takes in a long message.
double bits_per_value(ValueFormat format);

}  // namespace topreduce::wire
