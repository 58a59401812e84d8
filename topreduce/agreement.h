#pragma once

#include <string>

#include "topreduce/comm/communicator.h"
#include "topreduce/layout.h"
#include "topreduce/spec.h"

namespace topreduce {

/// What ranks must have in common, one fact a line: the settings and the model.
std::string describe(const Layout& layout, const Spec& spec);

/// Compares a text over the ranks, line by line. If it differs, std::invalid_argument on every rank
/// with the first lines that differ, by rank. Collective.
void expect_same_text(Communicator& comm, const std::string& text);

}  // namespace topreduce
