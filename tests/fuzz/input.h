#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <span>

namespace topreduce {

/// Takes numbers off the front of a fuzzer's input; zeros behind its end.
class Input {
 public:
  explicit Input(std::span<const std::byte> bytes) : bytes_(bytes) {}

  bool empty() const { return bytes_.empty(); }
  unsigned byte() {
    if (bytes_.empty()) return 0;
    const auto value = static_cast<unsigned>(bytes_.front());
    bytes_ = bytes_.subspan(1);
    return value;
  }
  unsigned word() {
    const unsigned low = byte();
    return low | byte() << 8;
  }
  /// At most `count` bytes.
  std::span<const std::byte> take(std::size_t count) {
    const auto taken = bytes_.first(std::min(count, bytes_.size()));
    bytes_ = bytes_.subspan(taken.size());
    return taken;
  }
  std::span<const std::byte> rest() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

inline void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace topreduce
