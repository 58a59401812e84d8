#include "topreduce/drift.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <vector>

#include "topreduce/wire/little_endian.h"

namespace topreduce {
namespace {

std::string names_of(const Communicator& comm, const std::vector<int>& ranks) {
  std::string names = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    names += (i == 0 ? "" : ", ") + comm.mailbox().name(ranks[i]);
  }
  return names;
}

// Who differs from most others, in words; empty if nobody does.
std::string describe(const Communicator& comm, const char* what,
                     const std::vector<std::uint64_t>& values) {
  std::map<std::uint64_t, std::vector<int>> by_value;
  for (std::size_t r = 0; r < values.size(); ++r) {
    by_value[values[r]].push_back(static_cast<int>(r));
  }
  if (by_value.size() < 2) return "";
  const auto most = std::ranges::max_element(by_value, [](const auto& a, const auto& b) {
    return std::pair(a.second.size(), -a.second.front()) <
           std::pair(b.second.size(), -b.second.front());
  });
  std::string words;
  for (const auto& [value, ranks] : by_value) {
    if (value == most->first) continue;
    words += (words.empty() ? "" : "; ") + names_of(comm, ranks);
    words += ranks.size() == 1 ? " has " : " have ";
    words += std::string("other ") + what + " than " + names_of(comm, most->second);
  }
  return words;
}

}  // namespace

void report_drift(Communicator& comm, std::uint64_t step, const Fingerprints& mine,
                  const std::string& advice) {
  std::array<std::byte, 16> bytes;
  wire::store(bytes.data(), mine.parameters);
  wire::store(bytes.data() + 8, mine.sums);
  comm::Inbox inbox;
  comm.all_gather(bytes, inbox);
  std::vector<std::uint64_t> parameters, sums;
  for (int r = 0; r < comm.size(); ++r) {
    const auto theirs = inbox.from(r);
    if (theirs.size() != bytes.size()) {
      throw WireError("step " + std::to_string(step) + ": fingerprints of " +
                      std::to_string(theirs.size()) + " bytes from rank " + comm.mailbox().name(r));
    }
    parameters.push_back(wire::load<std::uint64_t>(theirs.data()));
    sums.push_back(wire::load<std::uint64_t>(theirs.data() + 8));
  }
  std::string words = describe(comm, "parameters", parameters);
  if (words.empty()) words = describe(comm, "sums of gradients", sums) + advice;
  throw DriftError("step " + std::to_string(step) + ": the ranks have drifted apart: " + words);
}

}  // namespace topreduce
