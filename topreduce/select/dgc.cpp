// Deep Gradient Compression's sampled, hierarchical choice: the threshold of a small sample, then
// an exact choice among the few entries above it.
//
//   all n entries   . . | . . . | . . | . .     1 % of them at even distances from a random start
//   their k/100-th magnitude                    is a first threshold t for the whole
//   fewer than 0.8 k above t                    lower t by a fifth, count again; ten times at most
//   more than k above t                         an exact choice among them
//
// Sends at most k: the strongest of those above the last threshold. (The authors' code is exact
// from 1.3 k up; below that it sends the first k in memory, so that the end of a tensor may
// starve.) Drops nothing: what is not sent stays owed.
//
// Lin, Han, Mao, Wang, Dally 2018, arXiv 1712.01887; bands and factors as in the authors' code.

#include <algorithm>
#include <cmath>

#include "topreduce/catalog.h"
#include "topreduce/random.h"
#include "topreduce/select/rule.h"

namespace topreduce::select {
namespace {

constexpr double kTooFew = 0.8, kLower = 0.8;
constexpr double kRanked = 2;  // the sample holds at least so many of the k largest

class Sampled final : public Rule {
 public:
  Sampled(double share, std::uint64_t passes) : share_(share), passes_(passes) {}

  float cut(const Vector& vector, double k, const Budget& budget) override {
    take_sample(vector, k, budget);
    const auto n = static_cast<double>(vector.size), samples = static_cast<double>(sample_.size());
    const auto rank = static_cast<std::size_t>(std::ceil(k / n * samples));
    const std::size_t last = sample_.size();
    double threshold = kernels::kth_magnitude(sample_, std::clamp<std::size_t>(rank, 1, last));
    for (std::uint64_t i = 0; i < passes_; ++i) {
      if (vector.count_from(static_cast<float>(threshold)) >= kTooFew * k) break;
      threshold *= kLower;
    }
    return static_cast<float>(threshold);
  }

 private:
  void take_sample(const Vector& vector, double k, const Budget& budget) {
    const auto n = static_cast<double>(vector.size);
    const double wanted = std::max(std::ceil(share_ * n), std::ceil(kRanked * n / k));
    // An odd stride does not march in step with the rows of a matrix.
    const auto most = static_cast<std::size_t>(std::max(1.0, std::floor(n / wanted)));
    const std::size_t stride = most - (most % 2 == 0 ? 1 : 0);
    const RandomStream stream(budget.seed, budget.step, RandomStream::Purpose::sample);
    std::size_t next = stream.below(static_cast<std::uint32_t>(stride), 0);
    sample_.clear();
    sample_.reserve(vector.size / stride + 1);
    for (const kernels::Terms& part : vector.parts) {
      for (; next < part.size(); next += stride) sample_.push_back(part[next]);
      next -= part.size();
    }
  }

  double share_;
  std::uint64_t passes_;
  Buffer<float> sample_;
};

}  // namespace

std::unique_ptr<Selector> make_dgc(const Settings& settings, const Layout& layout) {
  return make_selector(
      "dgc", std::make_unique<Sampled>(settings.number("sample"), settings.integer("adaptations")),
      Finish::most, layout);
}

}  // namespace topreduce::select
