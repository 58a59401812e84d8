#include "topreduce/agreement.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "topreduce/fingerprint.h"
#include "topreduce/wire/little_endian.h"

namespace topreduce {
namespace {

constexpr int kShownDifferences = 3;

std::vector<std::string> lines_of(std::span<const std::byte> bytes) {
  std::istringstream text(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

// A peer's bytes may be anything, and an error's text goes to terminals and to Python.
std::string readable(const std::string& line) {
  constexpr std::size_t kMost = 200;
  std::string text;
  for (const char c : line.substr(0, kMost)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f && c != '\\') {
      text += c;
    } else {
      constexpr char kDigits[] = "0123456789abcdef";
      text += {'\\', 'x', kDigits[byte / 16], kDigits[byte % 16]};
    }
  }
  return line.size() > kMost ? text + "..." : text;
}

// Whether all ranks have this text; it grows with the model, so it travels only if they do not.
bool same_fingerprint(Communicator& comm, const std::string& text, comm::Inbox& inbox) {
  const std::uint64_t mine = Fingerprint().add(text).long_value();
  std::array<std::byte, sizeof(mine)> bytes;
  wire::store(bytes.data(), mine);
  comm.all_gather(bytes, inbox);
  for (int r = 0; r < comm.size(); ++r) {
    if (!std::ranges::equal(inbox.from(r), bytes)) return false;
  }
  return true;
}

}  // namespace

std::string describe(const Layout& layout, const Spec& spec) {
  std::string text = "method " + spec.name + "\n";
  for (const auto& [name, value] : spec.settings) text += name + " = " + value + "\n";
  for (const Parameter& parameter : layout.parameters()) {
    text += "parameter " + parameter.name + " (";
    for (const std::size_t extent : parameter.shape) text += " " + std::to_string(extent);
    text += " )\n";
  }
  return text;
}

void expect_same_text(Communicator& comm, const std::string& text) {
  comm::Inbox inbox;
  if (same_fingerprint(comm, text, inbox)) return;
  comm.all_gather(std::as_bytes(std::span(text.data(), text.size())), inbox);
  std::vector<std::vector<std::string>> lines;
  std::size_t longest = 0;
  for (int r = 0; r < comm.size(); ++r) {
    lines.push_back(lines_of(inbox.from(r)));
    longest = std::max(longest, lines.back().size());
  }
  const auto line = [&](std::size_t r, std::size_t i) -> std::string {
    return i < lines[r].size() ? lines[r][i] : "nothing";
  };
  std::string differences;
  int shown = 0;
  for (std::size_t i = 0; i < longest && shown < kShownDifferences; ++i) {
    std::string by_rank;
    bool same = true;
    for (std::size_t r = 0; r < lines.size(); ++r) {
      same = same && line(r, i) == line(0, i);
      by_rank += "\n  rank " + std::to_string(r) + ": " + readable(line(r, i));
    }
    if (same) continue;
    differences += by_rank;
    ++shown;
  }
  throw std::invalid_argument("the ranks do not agree; give all of them the same:" + differences);
}

}  // namespace topreduce
