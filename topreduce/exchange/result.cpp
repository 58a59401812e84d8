#include "topreduce/exchange/result.h"

#include <algorithm>
#include <utility>

namespace topreduce::exchange {

void bring(Device& device, Result& result) {
  const std::size_t count = std::exchange(result.on_device, 0);
  if (count == 0) return;
  Buffer<float> own(count);
  if (result.extent == Result::Extent::whole) {
    result.dense_sum.resize(count);
    device.bring_sums(result.key, {}, result.dense_sum, own);
    return;
  }
  result.sum.resize(count);
  device.bring_sums(result.key, result.sum.indices, result.sum.values, own);
  result.settled.assign(result.sum);
  std::ranges::copy(own, result.settled.values.begin());
}

}  // namespace topreduce::exchange
