#pragma once

#include <memory>

#include "topreduce/select/selector.h"

namespace topreduce::select {

/// What a rule looks at: the whole model in one exchange, or a sample of it, in memory order.
struct Vector {
  std::span<const kernels::Terms> parts;
  std::size_t size = 0;
  float largest = 0;  ///< magnitude
  Threads& threads;   ///< threads for passes over it

  /// Entries of magnitude >= threshold.
  double count_from(float threshold) const;
  kernels::Moments moments() const;
};

/// A published way to find a threshold: the whole of what its file has to say.
class Rule {
 public:
  virtual ~Rule() = default;
  /// The magnitude from which entries are sent, so that about k of `vector` are (0 < k < size; all
  /// values finite). Depends on nothing else but the seed and the number of the step in `budget`.
  virtual float cut(const Vector& vector, double k, const Budget& budget) = 0;
};

/// What becomes of the entries above the cut.
enum class Finish {
  all,    ///< all are sent, however many
  most,   ///< the strongest k of them
  exact,  ///< exactly the strongest k, whatever the cut was (ties to the lower index)
};

/// A threshold "magnitude above t" as the lowest magnitude that is.
float just_above(double t);

/// With one exchange for the model the rule sees this very step, and what it says is done to the
/// letter. When buckets come one by one nothing is known of those to come: rule and finish then
/// work on a sample of what the next step may hold (foresight.h), and the threshold that comes of
/// it serves that step, with a cap on every parameter. `name` stands before the names of the state.
std::unique_ptr<Selector> make_selector(std::string_view name, std::unique_ptr<Rule> rule,
                                        Finish finish, const Layout& layout);

}  // namespace topreduce::select
