#include "topreduce/wire/gaps.h"

#include <string>

#include "topreduce/errors.h"
#include "topreduce/wire/little_endian.h"

namespace topreduce::wire {
namespace {

[[noreturn]] void fail(std::size_t entry, const std::string& what) {
  throw WireError("message: index " + std::to_string(entry) + " " + what);
}

std::byte* encode_long(Index gap, std::byte* out) {
  for (; gap >= 0x80; gap >>= 7) *out++ = static_cast<std::byte>(gap | 0x80);
  *out++ = static_cast<std::byte>(gap);
  return out;
}

std::uint64_t decode_long(const std::byte*& next, const std::byte* end, std::size_t entry) {
  std::uint64_t gap = 0;
  for (std::size_t i = 0; i < kLargestGapBytes; ++i) {
    if (next == end) fail(entry, "is cut off, expected more bytes");
    const auto byte = static_cast<std::uint64_t>(*next++);
    gap |= (byte & 0x7f) << (7 * i);
    if (byte < 0x80) return gap;
  }
  fail(entry, "takes more than the expected " + std::to_string(kLargestGapBytes) + " bytes");
}

}  // namespace

std::byte* encode_gaps(std::span<const Index> indices, std::byte* out) {
  Index following = 0;
  for (const Index index : indices) {
    const Index gap = index - following;
    following = index + 1;
    if (gap < 1u << 14) {
      // One byte or two is anyone's guess at 1 %: write two, step over what counts, do not jump.
      const Index more = (gap + 0xff80) >> 16;  // 1 from 128 on
      store(out, static_cast<std::uint16_t>((gap & 0x7f) | (more << 7) | ((gap & ~0x7fu) << 1)));
      out += 1 + more;
    } else {
      out = encode_long(gap, out);
    }
  }
  return out;
}

void decode_gaps(std::span<const std::byte> bytes, Index universe, std::span<Index> indices) {
  const std::byte* next = bytes.data();
  const std::byte* const end = next + bytes.size();
  std::uint64_t following = 0;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    std::uint64_t gap;
    if (end - next >= 2 && (load<std::uint16_t>(next) & 0x8080) != 0x8080) {
      const auto low = static_cast<std::uint32_t>(next[0]);
      const auto high = static_cast<std::uint32_t>(next[1]);
      const std::uint32_t more = low >> 7;
      gap = (low & 0x7f) | ((high << 7) & (0u - more));
      next += 1 + more;
    } else {
      gap = decode_long(next, end, i);
    }
    const std::uint64_t index = following + gap;  // 64 bits: cannot wrap round into the universe
    if (index >= universe) {
      fail(i, "is " + std::to_string(index) + ", expected less than " + std::to_string(universe));
    }
    indices[i] = static_cast<Index>(index);
    following = index + 1;
  }
  if (next != end) {
    throw WireError("message: indices take " + std::to_string(next - bytes.data()) +
                    " bytes, expected " + std::to_string(bytes.size()));
  }
}

}  // namespace topreduce::wire
