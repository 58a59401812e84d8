#pragma once

#include <string>

#include "topreduce/comm/communicator.h"

namespace topreduce {

/// Compares a text over the ranks, line by line. If it differs, std::invalid_argument on every rank
/// with the first lines that differ, by rank. Collective.
void expect_same_text(Communicator& comm, const std::string& text);

/// A number that tells texts apart; not a secret.
std::uint32_t fingerprint(const std::string& text);

}  // namespace topreduce
