#include "topreduce/wire/seal.h"

#include <string>

#include "topreduce/errors.h"
#include "topreduce/fingerprint.h"
#include "topreduce/wire/checksum.h"
#include "topreduce/wire/little_endian.h"

namespace topreduce::wire {
namespace {

std::uint16_t contents_of(const Identity& identity) {
  const std::uint32_t hash = Fingerprint().add(identity.contents).value();
  return static_cast<std::uint16_t>(hash ^ hash >> 16);
}

std::uint32_t checksum_of(const Identity& identity, std::uint32_t round, std::uint16_t contents,
                          std::span<const std::byte> payload) {
  const std::uint64_t seed =
      Fingerprint().add(identity.origin).add(round).add(contents).long_value();
  return static_cast<std::uint32_t>(xxh64(payload, seed));
}

}  // namespace

Seal seal(const Identity& identity, std::uint32_t round, std::span<const std::byte> payload) {
  Seal seal;
  const std::uint16_t contents = contents_of(identity);
  store(seal.data(), contents);
  store(seal.data() + 2, checksum_of(identity, round, contents, payload));
  return seal;
}

std::span<const std::byte> open(const Identity& expected, std::uint32_t round,
                                std::span<const std::byte> message) {
  if (message.size() < kSealBytes) {
    throw WireError("message: length is " + std::to_string(message.size()) +
                    ", expected at least " + std::to_string(kSealBytes));
  }
  const auto payload = message.subspan(kSealBytes);
  const auto contents = load<std::uint16_t>(message.data());
  const auto checksum = load<std::uint32_t>(message.data() + 2);
  if (checksum != checksum_of(expected, round, contents, payload)) {
    throw WireError("message: wrong checksum; the message was damaged on its way");
  }
  if (contents != contents_of(expected)) {
    throw WireError(std::string("message: contents are not those expected: ") +
                    expected.disagreement);
  }
  return payload;
}

}  // namespace topreduce::wire
