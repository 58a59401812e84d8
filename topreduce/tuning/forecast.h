#pragma once

#include "topreduce/bucket_plan.h"
#include "topreduce/pipeline.h"

namespace topreduce::tuning {

/// Where a run would be.
struct Site {
  double entries = 0;  ///< of the model
  int ranks = 2;
  double computed = 0.1;          ///< seconds of a step, two thirds of them the backward pass
  double bytes_per_second = 1e9;  ///< of every link, each way
  double delay = 0;               ///< seconds from any rank to any other
};

/// What a step would cost there.
struct Forecast {
  double bytes = 0;     ///< that each rank sends
  double messages = 0;  ///< the same
  double waited = 0;    ///< seconds, after the last gradient
  double seconds = 0;   ///< of the whole step
};

/// Of a step that sends `level`, by the formulas of the exchange. The model that the pipeline was
/// made for need not be as large.
TOPREDUCE_API Forecast forecast(const Pipeline& pipeline, const Level& level, const Site& site);

/// Of PyTorch's own all-reduce under DistributedDataParallel, with so many bits for a value.
TOPREDUCE_API Forecast forecast_ddp(double bits, const Site& site);

/// The level that density=auto would find: the highest that waits at most `overhead` of a step. If
/// there is none, the highest that waits hardly longer than the lowest, or the lowest.
TOPREDUCE_API Level advise(const Pipeline& pipeline, const Site& site);

}  // namespace topreduce::tuning
