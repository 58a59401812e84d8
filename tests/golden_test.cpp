// The same bytes on every machine: messages as files in tests/golden, written once and compared
// ever since, both ways. A change of the format gets a new version and new files:
// TOPREDUCE_GOLDEN=write in the environment writes them.

#include <cstdlib>
#include <fstream>
#include <iterator>

#include <gtest/gtest.h>

#include "topreduce/wire/message.h"

namespace topreduce::wire {
namespace {

constexpr Index kUniverse = 2000;
// Listed, full and filled pieces; room between them; one that is empty. More indices than fill two
// blocks.
constexpr Piece kPieces[] = {{0, 900}, {900, 903}, {910, 1010}, {1010, 1010}, {1200, 2000}};

/// Numbers from a generator that fits into a line, with whole steps and powers of two.
class Numbers {
 public:
  unsigned next() { return (state_ = state_ * 1664525u + 1013904223u) >> 8; }
  float value() {
    const float size = static_cast<float>(1 + next() % 4096) / 4096.0f;
    const float scaled = next() % 9 == 0 ? size * 8 : size;
    return next() % 2 == 0 ? scaled : -scaled;
  }

 private:
  std::uint32_t state_ = 2026;
};

SparseVector golden_entries() {
  Numbers numbers;
  SparseVector entries;
  for (const Piece& piece : kPieces) {
    const bool crowded = piece.end - piece.begin <= 100;
    for (Index i = piece.begin; i < piece.end; ++i) {
      const bool chosen = crowded ? i % 50 != 7 : numbers.next() % 3 == 0;
      if (chosen) entries.push_back(i, numbers.value());
    }
  }
  return entries;
}

constexpr std::size_t kLengths[] = {70, 0, 1, 129};

std::vector<float> golden_stretch() {
  Numbers numbers;
  std::vector<float> values(200);
  for (float& value : values) value = numbers.value();
  return values;
}

class Golden : public testing::TestWithParam<std::string_view> {
 protected:
  static Envelope envelope() {
    Envelope envelope{
        .run = 0xfeedbeef, .step = 1'234'567'890'123, .bucket = 17, .universe = kUniverse};
    const auto at = std::find(kValuesNames.begin(), kValuesNames.end(), GetParam());
    envelope.values = static_cast<Values>(at - kValuesNames.begin());
    return envelope;
  }

  /// The file's bytes, which must be `message`.
  static std::vector<std::byte> compared(const char* kind, const Bytes& message) {
    const std::string path =
        std::string(TOPREDUCE_GOLDEN_FOLDER) + "/" + kind + "_" + std::string(GetParam()) + ".bin";
    const char* wish = std::getenv("TOPREDUCE_GOLDEN");
    if (wish != nullptr && std::string_view(wish) == "write") {
      std::ofstream(path, std::ios::binary)
          .write(reinterpret_cast<const char*>(message.data()),
                 static_cast<std::streamsize>(message.size()));
    }
    std::ifstream file(path, std::ios::binary);
    std::vector<std::byte> bytes;
    for (std::istreambuf_iterator<char> next(file), end; next != end; ++next) {
      bytes.push_back(static_cast<std::byte>(*next));
    }
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), message.begin(), message.end()))
        << path << " is another message of " << bytes.size() << " bytes, not " << message.size();
    return bytes;
  }
};

INSTANTIATE_TEST_SUITE_P(Wire, Golden, testing::ValuesIn(kValuesNames),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(Golden, EntriesAreTheseBytes) {
  auto sent = golden_entries();
  Bytes message;
  pack(envelope(), kPieces, Vote::yes, sent, message);
  SparseVector read;
  EXPECT_EQ(unpack(envelope(), kPieces, compared("entries", message), read), Vote::yes);
  EXPECT_EQ(read.indices, sent.indices);
  EXPECT_EQ(read.values, sent.values);
}

TEST_P(Golden, StretchesAreTheseBytes) {
  auto sent = golden_stretch();
  Bytes message;
  pack_stretch(envelope(), kLengths, Vote::no, sent, message);
  std::vector<float> read(sent.size());
  EXPECT_EQ(unpack_stretch(envelope(), kLengths, compared("stretch", message), read), Vote::no);
  EXPECT_EQ(read, sent);
}

}  // namespace
}  // namespace topreduce::wire
