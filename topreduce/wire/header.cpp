#include "topreduce/wire/header.h"

#include <bit>
#include <sstream>
#include <string>

#include "topreduce/fingerprint.h"
#include "topreduce/wire/checksum.h"
#include "topreduce/wire/little_endian.h"

namespace topreduce::wire {
namespace {

constexpr std::uint32_t kMagic = 0x31525054;  // "TPR1"
constexpr std::uint8_t kVersion = 4;

enum Place : std::size_t {
  kAtMagic = 0,
  kAtVersion = 4,
  kAtKind = 5,
  kAtValues = 6,
  kAtVote = 7,
  kAtRun = 8,
  kAtBucket = 12,
  kAtStep = 16,
  kAtContents = 24,
  kAtCount = 28,
  kAtPayloadBytes = 32,
  kAtLossScale = 40,
  kAtChecksum = 44,
};
static_assert(kAtChecksum + sizeof(std::uint32_t) == kHeaderBytes);

std::uint32_t checksum_of(std::span<const std::byte> message) {
  return checksum(message.first(kAtChecksum), message.subspan(kHeaderBytes));
}

void expect(bool right, const char* field, std::uint64_t came, const char* relation,
            std::uint64_t expected) {
  if (right) return;
  throw WireError(std::string("message: ") + field + " is " + std::to_string(came) + ", expected " +
                  relation + std::to_string(expected));
}

void expect_equal(const char* field, std::uint64_t came, std::uint64_t expected) {
  expect(came == expected, field, came, "", expected);
}

// Places are counted in the universe, so it is part of what a message is about.
std::uint32_t contents_of(const Envelope& envelope) {
  return Fingerprint().add(envelope.contents).add(envelope.universe).value();
}

}  // namespace

void seal(const Envelope& envelope, Kind kind, Vote vote, std::size_t count,
          std::span<std::byte> message) {
  std::byte* header = message.data();
  store(header + kAtMagic, kMagic);
  store(header + kAtVersion, kVersion);
  store(header + kAtKind, static_cast<std::uint8_t>(kind));
  store(header + kAtValues, static_cast<std::uint8_t>(envelope.values));
  store(header + kAtVote, static_cast<std::uint8_t>(vote));
  store(header + kAtRun, envelope.run);
  store(header + kAtBucket, envelope.bucket);
  store(header + kAtStep, envelope.step);
  store(header + kAtContents, contents_of(envelope));
  store(header + kAtCount, static_cast<std::uint32_t>(count));
  store(header + kAtPayloadBytes, static_cast<std::uint64_t>(message.size() - kHeaderBytes));
  store(header + kAtLossScale, std::bit_cast<std::uint32_t>(envelope.loss_scale));
  store(header + kAtChecksum, checksum_of(message));
}

std::uint64_t payload_bytes(std::span<const std::byte> message) {
  return load<std::uint64_t>(message.data() + kAtPayloadBytes);
}

float loss_scale_of(std::span<const std::byte> message) {
  return std::bit_cast<float>(load<std::uint32_t>(message.data() + kAtLossScale));
}

Opened open(const Envelope& expected, Kind kind, std::span<const std::byte> message) {
  expect(message.size() >= kHeaderBytes, "length", message.size(), "at least ", kHeaderBytes);
  const std::byte* header = message.data();
  const auto payload = message.subspan(kHeaderBytes);
  const auto byte_at = [header](Place place) { return load<std::uint8_t>(header + place); };
  const auto word_at = [header](Place place) { return load<std::uint32_t>(header + place); };
  const auto long_at = [header](Place place) { return load<std::uint64_t>(header + place); };

  expect_equal("magic", word_at(kAtMagic), kMagic);
  expect_equal("version", byte_at(kAtVersion), kVersion);
  expect_equal("payload length", long_at(kAtPayloadBytes), payload.size());
  // From here on a difference is a disagreement between ranks, not damage.
  expect_equal("checksum", word_at(kAtChecksum), checksum_of(message));
  expect_equal("run", word_at(kAtRun), expected.run);
  expect_equal("step", long_at(kAtStep), expected.step);
  expect_equal("bucket", word_at(kAtBucket), expected.bucket);
  expect_equal("kind", byte_at(kAtKind), static_cast<std::uint8_t>(kind));
  expect_equal("values encoding", byte_at(kAtValues), static_cast<std::uint8_t>(expected.values));
  if (word_at(kAtContents) != contents_of(expected)) {
    throw WireError(std::string("message: contents are not those expected: ") +
                    expected.disagreement);
  }
  const float scale = loss_scale_of(message);
  if (!(scale >= 0) || (scale != 0 && expected.loss_scale != 0 && scale != expected.loss_scale)) {
    std::ostringstream text;
    text << "message: loss scale is " << scale << ", expected " << expected.loss_scale
         << ": give all ranks the same scaler";
    throw WireError(text.str());
  }
  const std::uint32_t count = word_at(kAtCount);
  expect(count <= expected.universe, "count", count, "at most ", expected.universe);
  const std::uint8_t vote = byte_at(kAtVote);
  expect(vote <= static_cast<std::uint8_t>(Vote::ask), "vote", vote, "at most ", 2);
  return {static_cast<Vote>(vote), count, payload};
}

}  // namespace topreduce::wire
