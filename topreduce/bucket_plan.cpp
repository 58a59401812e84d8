#include "topreduce/bucket_plan.h"

#include <algorithm>
#include <cassert>

namespace topreduce {

BucketPlan::BucketPlan(const Layout& layout, std::span<const std::size_t> order, std::size_t cap)
    : parameters_(order.begin(), order.end()), bucket_of_(order.size()) {
  assert(is_order(order, layout.count()));
  const std::size_t full = std::max(cap, (layout.size() + kMost - 1) / kMost);
  std::size_t entries = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    bucket_of_[order[i]] = count();
    entries += layout[order[i]].size;
    if (entries < full && i + 1 < order.size()) continue;
    std::sort(parameters_.begin() + static_cast<std::ptrdiff_t>(starts_.back()),
              parameters_.begin() + static_cast<std::ptrdiff_t>(i + 1));
    starts_.push_back(i + 1);
    entries = 0;
  }
}

std::vector<std::size_t> reverse_order(const Layout& layout) {
  std::vector<std::size_t> order(layout.count());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = order.size() - 1 - i;
  return order;
}

bool is_order(std::span<const std::size_t> order, std::size_t parameters) {
  std::vector<char> named(parameters, 0);
  for (const std::size_t id : order) {
    if (id >= parameters || named[id]++ != 0) return false;
  }
  return order.size() == parameters;
}

}  // namespace topreduce
