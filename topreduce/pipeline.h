#pragma once

#include "topreduce/catalog.h"
#include "topreduce/tuning/density_controller.h"
#include "topreduce/tuning/level.h"

namespace topreduce {

/// The method `auto` leaves the exchange to the number of ranks.
Spec with_exchange(Spec method, int ranks);

/// A method with every setting resolved and its stages made; the Reducer runs it.
struct Pipeline {
  /// Throws std::invalid_argument for unknown words, values out of range, stages that do not fit
  /// together, and models too large for one exchange.
  Pipeline(const Layout& layout, const Spec& method);

  /// What `step` sends, unless that is found while running (`Rule::found`). Everything while
  /// warming up; then the density falls geometrically to its value.
  tuning::Level level_at(std::uint64_t step) const;
  /// Entries that each rank may send with this share of the compressed ones.
  Budget budget_at(std::uint64_t step, double share) const;
  /// Between what densities may be found, from few bytes to many; for `ranks` ranks.
  std::vector<tuning::Rung> ladder(int ranks) const;

  /// Whether gradients may stay on a device, as far as choosing and exchanging go.
  bool works_on(const Device& device) const;

  Spec spec;  ///< every setting, defaults included
  /// How the density of a step is known.
  enum class Rule { fixed, found, replayed } rule = Rule::fixed;
  double density = 1;  ///< fixed, or where the search starts
  double least_density = 0, most_density = 1;
  tuning::DensityController::Options search;
  tuning::Choices replay;
  Choice choice = Choice::alone;  ///< of the exchange
  Granularity granularity = Granularity::bucket;
  std::size_t bucket_entries = 0;  ///< that fill a bucket; more than there are if there is only one
  wire::ValueFormat values = wire::ValueFormat::fp32;
  wire::ValueFormat unremembered =
      wire::ValueFormat::fp32;  ///< where nobody owes what rounding took
  bool native = false;          ///< sums by the transport's own all-reduce
  bool compare = false;         ///< sums over the ranks before they are applied
  std::uint64_t warmup_steps = 0, ramp_steps = 0, seed = 0;

  /// Where a parameter of the whole layout lives: in `compressed` or in `uncompressed`.
  struct Place {
    enum class Home { compressed, dense } home;
    std::size_t parameter;
  };
  std::vector<Place> places;
  Layout compressed;    ///< parameters that are chosen from; stages know only these
  Layout uncompressed;  ///< parameters that are always sent whole

  std::unique_ptr<Threads> threads;  ///< threads for passes over long gradients
  std::unique_ptr<feedback::Feedback> feedback;
  std::unique_ptr<select::Selector> selector;  ///< null if the exchange needs none
  std::unique_ptr<exchange::Exchange> exchange;
};

}  // namespace topreduce
