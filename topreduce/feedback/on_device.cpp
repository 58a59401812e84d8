#include "topreduce/feedback/on_device.h"

#include "topreduce/feedback/blocks.h"

namespace topreduce::feedback {
namespace {

double commit_whole(const Pending& pending, const exchange::Delivery& delivery, float divisor,
                    float unit) {
  Buffer<float> settled, mean;
  const bool all = pending.plain() || delivery.dense_settled.empty();
  for (const Segment& segment : pending.segments()) {
    for (std::size_t i = segment.start; i < segment.start + segment.size(); ++i) {
      mean.push_back(delivery.dense_sum[i] / divisor * unit);
      if (!all) settled.push_back(delivery.dense_settled[i]);
    }
  }
  return pending.device()->commit_whole(settled, mean);
}

}  // namespace

double commit_on_device(const Pending& pending, const exchange::Delivery& delivery, int ranks,
                        float unit) {
  const auto divisor = static_cast<float>(ranks);
  pending.open();
  if (delivery.extent == exchange::Delivery::Extent::whole) {
    return commit_whole(pending, delivery, divisor, unit);
  }
  // Segments that nobody used are left out by now, so the device counts otherwise.
  SparseVector settled, mean;
  Cursor settlements(delivery.settled), sums(delivery.sum);
  Index first = 0;
  for (const Segment& segment : pending.segments()) {
    const std::size_t end = segment.start + segment.size();
    settlements.advance(segment.start, end, [&](std::size_t i, float value) {
      settled.push_back(first + static_cast<Index>(i), value);
    });
    sums.advance(segment.start, end, [&](std::size_t i, float value) {
      mean.push_back(first + static_cast<Index>(i), value / divisor * unit);
    });
    first += static_cast<Index>(segment.size());
  }
  return pending.device()->commit(settled, mean);
}

}  // namespace topreduce::feedback
