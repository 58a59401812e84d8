#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace topreduce::wire {

/// How a value travels. Packing rounds to it, so that what a rank settles is what its peers read.
enum class Values : std::uint8_t {
#define FORMAT(name, ...) name,
#include "topreduce/wire/formats.def"
#undef FORMAT
};

inline constexpr auto kValuesNames = std::to_array<std::string_view>({
#define FORMAT(name, ...) #name,
#include "topreduce/wire/formats.def"
#undef FORMAT
});

/// Values that share a scale, in this format; 1 if each stands for itself.
std::size_t values_per_scale(Values format);
/// The format for values that no parameter places or nobody remembers the rounding of: 16 bits at
/// least, each value for itself.
Values without_scales(Values format);
/// Bits that a value takes in a long message.
double bits_per_value(Values format);

}  // namespace topreduce::wire
