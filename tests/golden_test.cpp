// The same bytes on every machine: messages as files in tests/golden, written once and compared
// ever since, both ways. A change of the format gets a new version and new files:
// TOPREDUCE_GOLDEN=write in the environment writes them.

#include <cstdlib>
#include <fstream>
#include <iterator>

#include <gtest/gtest.h>

#include "topreduce/wire/payload.h"
#include "wire_bytes.h"

namespace topreduce::wire {
namespace {

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

std::vector<float> golden_values() {
  Numbers numbers;
  std::vector<float> values(200);
  for (float& value : values) value = numbers.value();
  return values;
}

constexpr Identity kIdentity{.origin = 0xfeedbeef'00000011, .contents = 1'234'567'890'123};
constexpr std::uint32_t kRound = 17;

class Golden : public testing::TestWithParam<std::string_view> {
 protected:
  static ValueFormat format() {
    const auto at = std::find(kValueFormatNames.begin(), kValueFormatNames.end(), GetParam());
    return static_cast<ValueFormat>(at - kValueFormatNames.begin());
  }

  /// The file's bytes, which must be `payload` with its seal.
  static std::vector<std::byte> compared(const char* kind, const Bytes& payload) {
    const Bytes message = sealed(kIdentity, kRound, payload);
    const std::string path =
        "tests/golden/" + std::string(kind) + "_" + std::string(GetParam()) + ".bin";
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

INSTANTIATE_TEST_SUITE_P(Wire, Golden, testing::ValuesIn(kValueFormatNames),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(Golden, EntriesAreTheseBytes) {
  auto sent = golden_entries();
  Bytes payload;
  EXPECT_TRUE(encode_entries(format(), kPieces, sent, payload, sent));
  const auto message = compared("entries", payload);
  SparseVector read;
  decode_entries(format(), kPieces, open(kIdentity, kRound, message), read);
  EXPECT_EQ(read.indices, sent.indices);
  EXPECT_EQ(read.values, sent.values);
}

TEST_P(Golden, ValuesAreTheseBytes) {
  auto sent = golden_values();
  Bytes payload;
  EXPECT_TRUE(encode_values(format(), kLengths, sent, payload, sent));
  const auto message = compared("values", payload);
  std::vector<float> read(sent.size());
  decode_values(format(), kLengths, open(kIdentity, kRound, message), read);
  EXPECT_EQ(read, sent);
}

}  // namespace
}  // namespace topreduce::wire
