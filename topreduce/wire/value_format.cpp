#include "topreduce/wire/value_format.h"

#include <stdexcept>
#include <string>

#include "topreduce/wire/formats/format.h"

namespace topreduce::wire {

const Format& format_of(ValueFormat values) {
  static const Format rows[] = {
#define FORMAT(name, bits, values_per_scale, has_zero) \
  {formats::name(), #name, bits, values_per_scale, has_zero},
#include "topreduce/wire/formats.def"
#undef FORMAT
  };
  const auto number = static_cast<std::size_t>(values);
  if (number >= std::size(rows)) {
    throw std::invalid_argument("values: no format has the number " + std::to_string(number));
  }
  return rows[number];
}

std::size_t values_per_scale(ValueFormat format) {
  return format_of(format).values_per_scale;
}

ValueFormat without_scales(ValueFormat format) {
  return values_per_scale(format) > 1 ? ValueFormat::bf16 : format;
}

double bits_per_value(ValueFormat format) {
  const Format& found = format_of(format);
  return found.bits +
         (found.values_per_scale > 1 ? 16.0 / static_cast<double>(found.values_per_scale) : 0.0);
}

}  // namespace topreduce::wire
