#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

namespace topreduce {

/// While it lives, this thread computes as IEEE 754 says by default: to nearest, with subnormal
/// numbers. Callers may have chosen otherwise (torch.set_flush_denormal), and threads inherit it;
/// then zeros would reach the smallest threshold, and ranks could differ in their bits.
class FloatMode {
 public:
  FloatMode() : before_(read()) {
    if (before_ != kDefault) write(kDefault);
  }
  ~FloatMode() {
    if (before_ != kDefault) write(before_);
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__) || defined(__i386__)
  using Word = std::uint32_t;
  static constexpr Word kDefault = 0x1f80;  // of MXCSR: all exceptions masked, nothing else
  static constexpr Word kFlags = 0x3f;      // exceptions that were seen: no mode
  static Word read() {
    return _mm_getcsr() & ~kFlags;
  }
  static void write(Word mode) {
    _mm_setcsr(mode);
  }
#elif defined(__aarch64__)
  using Word = std::uint64_t;
  static constexpr Word kDefault = 0;  // of FPCR
  static Word read() {
    Word mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void write(Word mode) {
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
  }
#else
  using Word = int;
  static constexpr Word kDefault = 0;
  static Word read() {
    return kDefault;
  }
  static void write(Word) {}
#endif

  Word before_;
};

/// A magnitude as a float, the largest one if it is larger: to cast such a double is undefined.
inline float to_magnitude(double value) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return static_cast<float>(std::clamp(value, 0.0, kLargest));
}

}  // namespace topreduce
