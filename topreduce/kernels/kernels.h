#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "topreduce/sparse_vector.h"

// The hot loops. Callers see plain functions; each source file holds a scalar reference and one
// Highway body that is compiled for every instruction set and chosen at run time.

namespace topreduce::kernels {

/// A vector that is looked at but never stored: x[i] = base[i] + scale * gradient[i], rounded after
/// the product and after the sum (no fused multiply-add). An empty `base` counts as zeros.
struct Terms {
  std::span<const float> base;
  std::span<const float> gradient;
  float scale = 1;

  std::size_t size() const { return gradient.size(); }
  float operator[](std::size_t i) const {
    const float scaled = scale * gradient[i];
    return base.empty() ? scaled : base[i] + scaled;
  }
  Terms part(std::size_t start, std::size_t count) const {
    return {base.empty() ? base : base.subspan(start, count), gradient.subspan(start, count),
            scale};
  }
};

/// What a pass over some terms saw; passes add to it.
struct Summary {
  double energy = 0;               ///< sum of squares; summed in another order on other targets
  std::uint32_t largest_bits = 0;  ///< bits of the largest magnitude; they order like magnitudes

  /// False if an infinity or NaN went by.
  bool finite() const { return largest_bits < 0x7f800000u; }
  /// Whether all magnitudes were at most `limit`.
  bool within(float limit) const { return largest_bits <= std::bit_cast<std::uint32_t>(limit); }
};

/// What passes over the parts of a vector saw together; their order decides the last bits.
inline Summary combine(std::span<const Summary> parts) {
  Summary all;
  for (const Summary& part : parts) {
    all.energy += part.energy;
    all.largest_bits = std::max(all.largest_bits, part.largest_bits);
  }
  return all;
}

/// Writes index (counted from `first`) and value of every x[i] with |x[i]| >= threshold, in order,
/// and returns how many. `indices` and `values` must have room for all of `terms` plus
/// kCollectSlack; what lies behind the returned count is undefined. A NaN is never collected.
std::size_t collect_above(const Terms& terms, float threshold, Index first, Index* indices,
                          float* values, Summary& summary);
inline constexpr std::size_t kCollectSlack = 16;

/// Number of |x[i]| >= threshold.
std::size_t count_above(const Terms& terms, float threshold);

/// Looks without choosing.
void summarize(const Terms& terms, Summary& summary);

/// Sums over a vector, in double.
struct Moments {
  double sum = 0;
  double magnitudes = 0;  ///< of |x|
  double squares = 0;     ///< of x * x

  Moments& operator+=(const Moments& other) {
    sum += other.sum;
    magnitudes += other.magnitudes;
    squares += other.squares;
    return *this;
  }
};

/// Sixteen partial sums, i modulo 16, then added up by halves: the same bits on every target,
/// unlike Summary::energy.
Moments moments(const Terms& terms);

/// x[i] for the whole of `terms`.
void evaluate(const Terms& terms, std::span<float> out);

/// out[j] = sum over i of x[i] * directions[j * stride + i]. Sixteen partial sums, i modulo 16,
/// then added up by halves; every product and sum is rounded.
void project(const Terms& terms, const float* directions, std::size_t stride, std::span<float> out);

/// base[i] += scale * gradient[i]; gradient[i] = 0. `base` may be empty.
void absorb(std::span<float> base, std::span<float> gradient, float scale);

/// base[i] += scale * gradient[i]; gradient[i] = base[i] as it was before. Returns the bits of the
/// largest magnitude of scale * gradient[i], see Summary.
std::uint32_t absorb_and_save(std::span<float> base, std::span<float> gradient, float scale);

/// sum[i] += part[i].
void add(std::span<float> sum, std::span<const float> part);

/// Writes the place (counted from `first`) and the sum of every place whose flag is not 0, in
/// order, and returns how many; those flags become 0, and their sums kNothing. `indices` and
/// `values` must have room for kTakeSlack more than there are; what lies behind the returned count
/// is undefined.
std::size_t take_sums(std::span<std::uint8_t> flags, float* sums, Index first, Index* indices,
                      float* values);
inline constexpr std::size_t kTakeSlack = 16;
inline constexpr float kNothing = -0.0f;  ///< plus x is x, to the bit

/// The k-th largest magnitude of `values` (1 <= k <= size, all finite): exact, by histograms of the
/// magnitudes' bits.
float kth_magnitude(std::span<const float> values, std::size_t k);

/// Names of the instruction sets that this machine can run and this build holds.
/// `use_target` runs everything on one of them ("" returns to the best); for tests and benchmarks,
/// not while another thread is in a kernel.
std::span<const char* const> targets();
void use_target(const char* name);

// The references that every target must equal: bit for bit, but for `energy` (relative 1e-5).
namespace scalar {
std::size_t collect_above(const Terms& terms, float threshold, Index first, Index* indices,
                          float* values, Summary& summary);
std::size_t count_above(const Terms& terms, float threshold);
void summarize(const Terms& terms, Summary& summary);
Moments moments(const Terms& terms);
void evaluate(const Terms& terms, std::span<float> out);
void project(const Terms& terms, const float* directions, std::size_t stride, std::span<float> out);
void absorb(std::span<float> base, std::span<float> gradient, float scale);
std::uint32_t absorb_and_save(std::span<float> base, std::span<float> gradient, float scale);
void add(std::span<float> sum, std::span<const float> part);
std::size_t take_sums(std::span<std::uint8_t> flags, float* sums, Index first, Index* indices,
                      float* values);
float kth_magnitude(std::span<const float> values, std::size_t k);
}  // namespace scalar

}  // namespace topreduce::kernels
