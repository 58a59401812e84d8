// RedSync: a threshold on the line from the mean magnitude to the largest one.
//
//   mean |-------|-------|-------|-------| largest      t = mean + ratio (largest - mean)
//        0      1/4     1/2     3/4      1  = ratio
//
//   search=binary    halve the range of the ratio until k to 2k entries are above, or it is
//                    narrower than 0.2: three counts at most
//   search=trimmed   lower the ratio from 0.8 in steps of 0.2 until at least k are above
//
// Sends whatever is above: with heavy tails that can be a few, or hundreds of k. finish=exact sends
// the strongest k instead. Drops nothing: what is not sent stays owed.
//
// Fang, Fu, Yang, Hsieh 2018, arXiv 1808.04357; constants as in the code of arXiv 1911.08772, which
// compares with it. A count between k/2 and k narrows the range from below there, and here.

#include <algorithm>

#include "topreduce/catalog.h"
#include "topreduce/select/rule.h"
#include "topreduce/select/strongest.h"

namespace topreduce::select {
namespace {

class Line {
 public:
  explicit Line(const Vector& vector)
      : mean_(vector.moments().magnitudes / static_cast<double>(vector.size)),
        rise_(vector.largest - mean_) {}
  float at(double ratio) const { return just_above(mean_ + ratio * rise_); }

 private:
  double mean_, rise_;
};

class Binary final : public Rule {
 public:
  float cut(const Vector& vector, double k, const Budget&) override {
    const Line line(vector);
    double low = 0, high = 1;
    float threshold = 0;
    while (high - low > 0.2) {
      const double ratio = (low + high) / 2;
      threshold = line.at(ratio);
      const double count = vector.count_from(threshold);
      if (count > k && count < 2 * k) break;
      (count < k / 2 ? high : low) = ratio;
    }
    return threshold;
  }
};

class Trimmed final : public Rule {
 public:
  float cut(const Vector& vector, double k, const Budget&) override {
    const Line line(vector);
    for (int fifths = 4; fifths >= 0; --fifths) {
      const float threshold = line.at(fifths / 5.0);
      if (vector.count_from(threshold) >= k) return threshold;
    }
    return kNonZero;  // magnitudes so even that fewer than k exceed their mean
  }
};

}  // namespace

std::unique_ptr<Selector> make_redsync(const Settings& settings, const Layout& layout) {
  std::unique_ptr<Rule> rule;
  if (settings.text("search") == "binary") {
    rule = std::make_unique<Binary>();
  } else {
    rule = std::make_unique<Trimmed>();
  }
  const auto finish = settings.text("finish") == "exact" ? Finish::exact : Finish::all;
  return make_selector("redsync", std::move(rule), finish, layout);
}

}  // namespace topreduce::select
