#pragma once

#include "topreduce/exchange/delivery.h"
#include "topreduce/pending.h"

namespace topreduce::feedback {

/// Feedback::commit for gradients on a device, with (residual) or without (none) what is owed
/// there.
double commit_on_device(const Pending& pending, const exchange::Delivery& delivery, int ranks,
                        float unit);

}  // namespace topreduce::feedback
