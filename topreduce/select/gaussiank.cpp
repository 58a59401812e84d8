// Gaussian-K: the threshold that a normal distribution with the mean and deviation of the vector
// would have, corrected at most twice by the count that it gives.
//
//   count   0 ..... 2k/3 ..... 4k/3 .....       threshold = mean + z(k/n) * deviation
//           halve it  |  stop  |  times 1.5     three counts; the last correction is not counted,
//                                               so not used
//
// Sends whatever is above: neither at least nor at most k. On bell-shaped vectors that is about k.
// On heavier tails the first guess is 8 to 30 times too many; on what error feedback leaves of pure
// noise it sends next to nothing for many steps. finish=exact sends the strongest k instead.
// Drops nothing: what is not sent stays owed.
//
// sides=two is the authors' code (half of k in each tail of the signed values, tested against
// magnitudes), sides=one the text of the paper, which selects about twice as many.
// Shi, Chu, Cheung, See 2019, arXiv 1911.08772.

#include <algorithm>
#include <cmath>
#include <numbers>

#include "topreduce/catalog.h"
#include "topreduce/select/rule.h"

namespace topreduce::select {
namespace {

// How many deviations above the mean a share of `tail` (0 to 1) of a normal distribution lies.
double normal_quantile(double tail) {
  double low = -40, high = 40;
  for (int halvings = 0; halvings < 64; ++halvings) {
    const double middle = (low + high) / 2;
    (std::erfc(middle / std::numbers::sqrt2) / 2 > tail ? low : high) = middle;
  }
  return high;
}

class GaussianK final : public Rule {
 public:
  GaussianK(double tails, std::uint64_t evaluations) : tails_(tails), evaluations_(evaluations) {}

  float cut(const Vector& vector, double k, const Budget&) override {
    const auto n = static_cast<double>(vector.size);
    const kernels::Moments moments = vector.moments();
    const double mean = moments.sum / n;
    const double variance = (moments.squares - moments.sum * mean) / std::max(1.0, n - 1);
    const double z = normal_quantile(k / n / tails_);
    double next = mean + z * std::sqrt(std::max(0.0, variance)), threshold = next;
    for (std::uint64_t i = 0; i < evaluations_; ++i) {
      threshold = next;
      const double count = vector.count_from(just_above(threshold));
      if (count < 2 * k / 3) {
        next = threshold * 0.5;
      } else if (count > 4 * k / 3) {
        next = threshold * 1.5;
      } else {
        break;
      }
    }
    return just_above(threshold);
  }

 private:
  double tails_;
  std::uint64_t evaluations_;
};

}  // namespace

std::unique_ptr<Selector> make_gaussiank(const Settings& settings, const Layout& layout) {
  const double tails = settings.text("sides") == "two" ? 2 : 1;
  const auto finish = settings.text("finish") == "exact" ? Finish::exact : Finish::all;
  return make_selector("gaussiank",
                       std::make_unique<GaussianK>(tails, settings.integer("evaluations")), finish,
                       layout);
}

}  // namespace topreduce::select
