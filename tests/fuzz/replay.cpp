// A fuzzer's target without a fuzzer: every file of its corpus, then as many inputs as asked for
// that are made of them by chance, the same in every run. An input that fails is left in a file.
//
//   <target>_replay <number of inputs to make> <file or folder ...>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <sanitizer/common_interface_defs.h>
#include <span>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <vector>

#include "tests/tiers.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

/// With a stack trace where a requirement fails, and no message that makes us allocate much.
extern "C" const char* __asan_default_options() {
  return "handle_abort=1:max_allocation_size_mb=64";
}

namespace topreduce {
namespace {

namespace fs = std::filesystem;

using Text = std::vector<std::uint8_t>;

constexpr std::size_t kLongest = 2000;
constexpr unsigned kPatience = 30;  // seconds for one input

std::string failed_at;          // where an input that fails is left
std::span<const char> current;  // the one under way

void leave_input() {
  if (current.data() == nullptr) return;
  std::FILE* file = std::fopen(failed_at.c_str(), "wb");
  if (file == nullptr) return;
  std::fwrite(current.data(), 1, current.size(), file);
  std::fclose(file);
  std::fprintf(stderr, "The input that failed (%zu bytes) is in %s\n", current.size(),
               failed_at.c_str());
}

void run(const Text& input) {
  // A copy without spare room, so that the sanitizer sees a reader that runs over the end.
  const std::vector<char> exact(input.begin(), input.end());
  const std::span<const char> bytes(exact);
  static const char nothing = 0;
  current = bytes.empty() ? std::span(&nothing, 0) : bytes;
  alarm(kPatience);
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(current.data()), current.size());
  current = {};
}

Text read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return Text(std::istreambuf_iterator<char>(file), {});
}

/// In the order of their names, which a folder does not promise.
std::vector<Text> corpus(std::span<char*> paths) {
  std::vector<fs::path> files;
  for (const char* path : paths) {
    if (!fs::is_directory(path)) {
      files.emplace_back(path);
      continue;
    }
    for (const auto& entry : fs::directory_iterator(path)) files.push_back(entry.path());
  }
  std::ranges::sort(files);
  std::vector<Text> texts;
  for (const fs::path& path : files) texts.push_back(read(path));
  if (texts.empty()) throw std::invalid_argument("no files to begin with");
  return texts;
}

// ---- inputs by chance --------------------------------------------------------------------------

class Maker {
 public:
  explicit Maker(const std::vector<Text>& corpus) : corpus_(corpus) {}

  /// One of the corpus, with one to four changes.
  Text next() {
    Text text = any();
    for (std::size_t left = 1 + below(4); left > 0; --left) change(text);
    if (text.size() > kLongest) text.resize(kLongest);
    return text;
  }

 private:
  std::size_t below(std::size_t bound) { return random_() % bound; }
  const Text& any() { return corpus_[below(corpus_.size())]; }
  std::uint8_t byte() { return static_cast<std::uint8_t>(random_()); }

  /// Some bytes of a text that has any, most often few.
  std::span<const std::uint8_t> part(const Text& text) {
    const std::size_t begin = below(text.size()), most = text.size() - begin;
    const std::size_t size = below(2) == 0 ? std::min<std::size_t>(most, 8) : most;
    return std::span(text).subspan(begin, 1 + below(size));
  }

  void change(Text& text) {
    const auto at = [&](std::size_t place) {
      return text.begin() + static_cast<std::ptrdiff_t>(place);
    };
    if (text.empty()) return text.push_back(byte());
    const std::size_t place = below(text.size());
    switch (below(7)) {
      case 0: text[place] = static_cast<std::uint8_t>(text[place] ^ 1U << below(8)); break;
      case 1: text[place] = byte(); break;
      case 2: {  // numbers at a border
        constexpr std::uint8_t kBorders[] = {0, 1, 0x7f, 0x80, 0xff};
        const std::size_t end = std::min(text.size(), place + (std::size_t{1} << below(4)));
        std::fill(at(place), at(end), kBorders[below(std::size(kBorders))]);
        break;
      }
      case 3: text.insert(at(place), 1 + below(8), byte()); break;
      case 4: {
        const std::size_t size = part(text).size();
        text.erase(at(place), at(std::min(text.size(), place + size)));
        break;
      }
      case 5: {  // a part of this or another, in between
        const Text other = below(2) == 0 ? text : any();
        if (other.empty()) break;
        const auto more = part(other);
        text.insert(at(place), more.begin(), more.end());
        break;
      }
      case 6: {  // the front of one, the end of another
        const Text& other = any();
        text.resize(place);
        if (other.empty()) break;
        text.insert(text.end(), other.begin() + static_cast<std::ptrdiff_t>(below(other.size())),
                    other.end());
        break;
      }
    }
  }

  const std::vector<Text>& corpus_;
  std::mt19937_64 random_{2026};
};

int replay(const char* program, std::size_t made, std::span<char*> paths) {
  if (!kLong) made /= 4;
  failed_at = std::string(program) + ".failed";
  __sanitizer_set_death_callback(leave_input);
  std::signal(SIGALRM, [](int) { std::abort(); });
  const std::vector<Text> texts = corpus(paths);
  for (const Text& text : texts) run(text);
  Maker maker(texts);
  for (std::size_t i = 0; i < made; ++i) run(maker.next());
  std::printf("%zu inputs of the corpus, %zu made of them\n", texts.size(), made);
  return 0;
}

}  // namespace
}  // namespace topreduce

int main(int count, char** words) {
  if (count < 3) {
    std::fprintf(stderr, "usage: %s <number of inputs to make> <file or folder ...>\n", words[0]);
    return 2;
  }
  return topreduce::replay(words[0], std::stoul(words[1]),
                           std::span(words, static_cast<std::size_t>(count)).subspan(2));
}
