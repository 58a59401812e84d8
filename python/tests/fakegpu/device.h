#pragma once

// What torch's parts of the device share.

#include <ATen/core/Tensor.h>

#include "machine.h"

namespace fakegpu {

/// Of the calling thread.
int current_stream();

inline bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

/// The addresses from a tensor's first entry to its last.
Range range_of(const at::Tensor& tensor);

/// The same entries as a tensor in main memory, for the device's own threads.
at::Tensor from_inside(const at::Tensor& tensor);

}  // namespace fakegpu
