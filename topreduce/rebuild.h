#pragma once

#include <cstdint>
#include <vector>

#include "topreduce/api.h"

namespace topreduce {

/// What the ranks of a new group find when they meet after some were lost, or others came
/// (Reducer::plan_rebuild). The same on all of them.
struct TOPREDUCE_API RebuildPlan {
  /// What a rank must do to go on.
  enum class Role : std::uint8_t {
    on_time,  ///< has committed the last step that any of them has
    late,     ///< failed in the vote of that step, which others have committed: it commits it too
    joins     ///< made other steps, or none: it starts with no debts
  };
  std::vector<Role> roles;  ///< by rank
  std::uint64_t step = 0;   ///< that all of them make next
  int leader = 0;           ///< the first rank that is on time
  int ranks_before = 0;     ///< of the leader's last step
  int lost = 0;             ///< of these, ranks whose debts are lost
  /// About how much that was: the norm of what so many ranks owe, if they are like the others.
  double lost_norm = 0;
  /// How many rebuilds these ranks have been through.
  std::uint32_t rebuilds = 0;

  int count(Role role) const;
  /// Whether the same ranks go on, so that what they have learnt together stays.
  bool same_ranks() const;
  /// What is owed is multiplied by it, so that its mean over the ranks stays.
  float scale() const;
};

}  // namespace topreduce
