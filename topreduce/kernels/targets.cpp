// Which instruction sets there are, and forcing one of them.

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <hwy/highway.h>

#include "topreduce/kernels/kernels.h"

namespace topreduce::kernels {

std::span<const char* const> targets() {
  static const std::vector<const char*> names = [] {
    std::vector<const char*> result;
    for (const auto target : hwy::SupportedAndGeneratedTargets()) {
      result.push_back(hwy::TargetName(target));
    }
    return result;
  }();
  return names;
}

void use_target(const char* name) {
  if (std::string_view(name).empty()) {
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    return;
  }
  std::string known;
  for (const auto target : hwy::SupportedAndGeneratedTargets()) {
    if (std::string_view(name) == hwy::TargetName(target)) {
      hwy::GetChosenTarget().Update(target);
      return;
    }
    known += std::string(" ") + hwy::TargetName(target);
  }
  throw std::invalid_argument("kernels: no target '" + std::string(name) + "'; there are:" + known);
}

}  // namespace topreduce::kernels
