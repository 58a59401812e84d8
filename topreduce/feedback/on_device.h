#pragma once

#include "topreduce/compensated_gradient.h"
#include "topreduce/exchange/result.h"

namespace topreduce::feedback {

/// Feedback::commit for gradients on a device, with (residual) or without (none) what is owed
/// there. How much energy goes is for Device::settled_energy to say.
void commit_on_device(const CompensatedGradient& compensated, const exchange::Result& result,
                      int ranks, float unit);

}  // namespace topreduce::feedback
