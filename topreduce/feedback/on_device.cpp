#include "topreduce/feedback/on_device.h"

#include "topreduce/feedback/blocks.h"

namespace topreduce::feedback {
namespace {

void commit_whole(const CompensatedGradient& compensated, const exchange::Result& result,
                  float divisor, float unit) {
  Buffer<float> settled, mean;
  const bool all = compensated.plain() || result.dense_settled.empty();
  for (const Segment& segment : compensated.segments()) {
    for (std::size_t i = segment.start; i < segment.start + segment.size(); ++i) {
      mean.push_back(result.dense_sum[i] / divisor * unit);
      if (!all) settled.push_back(result.dense_settled[i]);
    }
  }
  compensated.device()->commit_whole(settled, mean);
}

}  // namespace

void commit_on_device(const CompensatedGradient& compensated, const exchange::Result& result,
                      int ranks, float unit) {
  const auto divisor = static_cast<float>(ranks);
  compensated.open();
  if (result.on_device > 0) {
    compensated.device()->commit_sums(result.key, divisor, unit);
    return;
  }
  if (result.extent == exchange::Result::Extent::whole) {
    commit_whole(compensated, result, divisor, unit);
    return;
  }
  // Segments that nobody used are left out by now, so the device counts otherwise.
  SparseVector settled, mean;
  Cursor settlements(result.settled), sums(result.sum);
  Index first = 0;
  for (const Segment& segment : compensated.segments()) {
    const std::size_t end = segment.start + segment.size();
    settlements.advance(segment.start, end, [&](std::size_t i, float value) {
      settled.push_back(first + static_cast<Index>(i), value);
    });
    sums.advance(segment.start, end, [&](std::size_t i, float value) {
      mean.push_back(first + static_cast<Index>(i), value / divisor * unit);
    });
    first += static_cast<Index>(segment.size());
  }
  compensated.device()->commit(settled, mean);
}

}  // namespace topreduce::feedback
