#include "topreduce/exchange/channel.h"

#include <algorithm>
#include <array>
#include <string>

#include "topreduce/wire/payload.h"

namespace topreduce::exchange {

using comm::at;

namespace {

constexpr std::size_t kMostAround = 64;  // bytes that stand around values, or about so many

}  // namespace

void Channel::open(Communicator& comm, const Subject& subject,
                   const CompensatedGradient& compensated, StepStats& stats, Workspace& workspace) {
  comm_ = &comm;
  stats_ = &stats;
  threads_ = &Threads::none();
  workspace_ = &workspace;
  subject_ = subject;
  Device* const device = subject.native ? compensated.device() : nullptr;
  adder_ = device != nullptr && device->adds_up() ? device : nullptr;
  values_ = subject.values;
  contents_ = Fingerprint().add(subject.parameters).add(compensated.size()).long_value();
  disagreement_ = wire::Identity().disagreement;
  chosen_ = false;
  parameters_.clear();
  for (const Segment& segment : compensated.segments()) {
    parameters_.push_back({segment.start, static_cast<Index>(segment.end())});
  }
  rounds_ = 0;
  finite_ = true;
  waiting_ = {};
}

void Channel::expect_same(const Fingerprint& choice, const char* disagreement) {
  contents_ = Fingerprint().add(contents_).add(choice.long_value()).long_value();
  disagreement_ = disagreement;
  chosen_ = true;
}

wire::Identity Channel::identity() const {
  return {.origin = Fingerprint()
                        .add(subject_.run)
                        .add(subject_.step)
                        .add(static_cast<std::uint64_t>(values_))
                        .long_value(),
          .contents = contents_,
          .disagreement = disagreement_};
}

std::string Channel::title() const {
  return "rank " + std::to_string(rank()) + ", step " + std::to_string(subject_.step) +
         ", bucket of parameter " + std::to_string(subject_.exchange);
}

void Channel::refuse(int from, const char* what) const {
  throw WireError(title() + ", message from rank " + std::to_string(from) + ": " + what);
}

// ---- rounds ------------------------------------------------------------------------------------

Channel::Round Channel::next_round(std::size_t messages) {
  if (ranks() > 1) ++stats_->rounds;
  return {{subject_.exchange, rounds_++}, messages};
}

Channel::Round Channel::open_round() {
  const Round round = next_round(at(ranks() - 1));
  for (int r = 0; r < ranks(); ++r) {
    if (r != rank()) comm_->expect(round.tag, r);
  }
  return round;
}

void Channel::post(const Round& round, int to, std::span<const std::byte> payload) {
  comm_->post(to, round.tag, wire::seal(identity(), round.tag.round, payload), payload);
}

void Channel::post_to_all(const Round& round, std::span<const std::byte> payload) {
  const wire::Seal seal = wire::seal(identity(), round.tag.round, payload);
  for (int turn = 1; turn < ranks(); ++turn) {  // not everyone to the same rank at once
    comm_->post((rank() + turn) % ranks(), round.tag, seal, payload);
  }
}

std::span<const std::byte> Channel::payload(const Round& round, int from) const {
  try {
    return wire::open(identity(), round.tag.round, comm_->message(round.tag, from));
  } catch (const WireError& error) {
    refuse(from, error.what());
  }
}

// The fingerprint of the contents travels as numbers and their squares: the mean of squares is the
// square of the mean only if all ranks have the same. They are so small that sums are exact. What
// the ranks chose may have other lengths if it is not the same; so that is asked before.
Channel::Stamp Channel::stamp_of(std::size_t values) const {
  constexpr std::size_t kBits = 4;
  const std::uint32_t hash = Fingerprint().add(contents_).add(values).value();
  Stamp stamp;
  for (std::size_t i = 0; i < stamp.size() / 2; ++i) {
    stamp[2 * i] = static_cast<float>(hash >> kBits * i & ((1u << kBits) - 1));
    stamp[2 * i + 1] = stamp[2 * i] * stamp[2 * i];
  }
  return stamp;
}

void Channel::expect_stamp(const Stamp& stamp, std::span<const float> sums) const {
  for (std::size_t i = 0; i < stamp.size(); ++i) {
    if (sums[i] == stamp[i] * static_cast<float>(ranks())) continue;
    throw WireError(title() + ": " + disagreement_);
  }
}

void Channel::reduce_natively(Buffer<float>& scratch, std::span<float> values) {
  if (ranks() == 1) return;
  const Stamp stamp = stamp_of(values.size());
  make_room(scratch, values.size() + stamp.size());
  scratch.assign(stamp.begin(), stamp.end());
  if (!chosen_) scratch.insert(scratch.end(), values.begin(), values.end());
  add_up_natively(scratch);
  expect_stamp(stamp, scratch);
  if (chosen_) return add_up_natively(values);
  std::ranges::copy(std::span(scratch).subspan(stamp.size()), values.begin());
}

void Channel::reduce_noted(std::size_t entries, std::span<float> sums) {
  Stopwatch watch(seconds(Stage::network));
  const Stamp stamp = stamp_of(entries);
  Stamp summed = stamp;
  announce_native(stamp.size() + sums.size());
  adder_->add_up_noted(summed, sums);
  expect_stamp(stamp, summed);
}

void Channel::reduce_there(std::size_t count, Result& result) {
  result.key = number();
  result.on_device = count;
  if (chosen_ || count == 0) reduce_noted(count, {});
  if (count == 0) return;
  Stopwatch watch(seconds(Stage::network));
  const Stamp stamp = stamp_of(count);
  Stamp summed = stamp;
  const std::span<float> numbers = chosen_ ? std::span<float>() : summed;
  announce_native(numbers.size() + count);
  adder_->add_up(numbers, result.runs, result.key);
  if (!chosen_) expect_stamp(stamp, summed);
}

void Channel::reduce_best(std::size_t noted, std::span<const Device::Ranked> parts,
                          std::span<const Index> picks, Result& result) {
  Stopwatch watch(seconds(Stage::network));
  std::size_t count = 0;
  for (const Device::Ranked& part : parts) {
    count += std::size_t{part.width} * (part.rows > 0 ? part.picks : 1);
  }
  result.key = number();
  result.on_device = count;
  const Stamp stamp = stamp_of(noted + count);
  Stamp summed = stamp;
  announce_native(stamp.size() + noted);
  announce_native(count);
  const bool same = adder_->add_up_best(summed, parts, picks, result.key);
  expect_stamp(stamp, summed);
  if (!same) throw WireError(title() + ": the ranks chose different rows");
}

void Channel::announce_native(std::size_t values) {
  if (ranks() == 1) return;
  ++stats_->rounds;
  comm_->announce_native_all_reduce(values);
}

void Channel::add_up_natively(std::span<float> values) {
  Stopwatch watch(seconds(Stage::network));
  ++stats_->rounds;
  comm_->native_all_reduce(values);
}

// ---- entries -----------------------------------------------------------------------------------

void Channel::encode(wire::Pieces pieces, const SparseVector& entries, SparseVector& rounded,
                     Bytes& out) {
  make_room(out, out.size() + wire::largest_payload(entries.size(), pieces.size()));
  finite_ = wire::encode_entries(values_, pieces, entries, out, rounded) && finite_;
}

void Channel::decode_from(int from, wire::Pieces pieces, std::span<const std::byte> payload,
                          SparseVector& entries) const {
  try {
    wire::decode_entries(values_, pieces, payload, entries);
  } catch (const WireError& error) {
    refuse(from, error.what());
  }
}

Channel::Round Channel::send_to_all(wire::Pieces pieces, const SparseVector& mine,
                                    SparseVector& rounded) {
  if (ranks() == 1) {
    rounded.assign(mine);
    return next_round(0);
  }
  Stopwatch watch(seconds(Stage::pack));
  workspace_->payload.clear();
  encode(pieces, mine, rounded, workspace_->payload);
  return send_payload_to_all(workspace_->payload);
}

Channel::Round Channel::send_payload_to_all(std::span<const std::byte> payload) {
  const Round round = open_round();
  if (ranks() > 1) post_to_all(round, payload);
  return round;
}

Channel::Round Channel::send_to_each(std::span<const SparseVector> outgoing,
                                     const RegionMap& regions, Parts& rounded) {
  Stopwatch watch(seconds(Stage::pack));
  const Round round = open_round();
  rounded.resize(at(ranks()));
  for (int r = 0; r < ranks(); ++r) {
    if (r == rank()) {
      rounded[at(r)].assign(outgoing[at(r)]);
      continue;
    }
    workspace_->payload.clear();
    encode(regions.owned[at(r)], outgoing[at(r)], rounded[at(r)], workspace_->payload);
    post(round, r, workspace_->payload);
  }
  return round;
}

void Channel::read_from_each(const Round& round, const RegionMap& regions, const SparseVector& own,
                             Parts& parts) {
  read_from_all(
      round, [&](int) { return wire::Pieces(regions.owned[at(rank())]); }, own, parts);
}

// A carrier's message: for each rank of whom it has entries, its number, bytes, and the payload as
// it came.
Channel::Round Channel::send_to_carriers(std::span<const SparseVector> outgoing,
                                         const RegionMap& regions, Parts& rounded) {
  Stopwatch watch(seconds(Stage::pack));
  const Round round = open_round();
  const wire::Pieces mine = regions.owned[at(rank())];
  rounded.resize(at(ranks()));
  carried_.clear();
  for (int turn = 0; turn < ranks(); ++turn) {
    const int r = (rank() + turn) % ranks();
    Bytes& payload = workspace_->payload;
    payload.clear();
    rounded[at(r)].clear();
    if (!outgoing[at(r)].empty()) encode(mine, outgoing[at(r)], rounded[at(r)], payload);
    if (r == rank()) {
      carry(r, payload);
    } else {
      post(round, r, payload);
    }
  }
  return round;
}

void Channel::carry(int sender, std::span<const std::byte> payload) {
  if (payload.empty()) return;
  comm::append_varint(carried_, at(sender));
  comm::append_varint(carried_, payload.size());
  append(carried_, payload);
}

Channel::Round Channel::carry_to_all(const Round& came) {
  for (int r = 0; r < ranks(); ++r) {
    if (r != rank()) carry(r, payload(came, r));
  }
  close(came);
  return send_payload_to_all(carried_);
}

void Channel::read_carried(const Round& round, const RegionMap& regions, const SparseVector& own,
                           Parts& parts) {
  Stopwatch watch(seconds(Stage::unpack));
  const auto some = workspace_->vectors.take(number());
  const auto sums = workspace_->parts.take(number());  // of each sender so far, and what comes next
  parts.resize(at(ranks()));
  for (SparseVector& part : parts) part.clear();
  sums->resize(2);
  for (int carrier = 0; carrier < ranks(); ++carrier) {
    auto rest = carrier == rank() ? std::span<const std::byte>(carried_) : payload(round, carrier);
    while (!rest.empty()) {
      std::uint64_t sender, bytes;
      if (!comm::read_varint(rest, sender) || !comm::read_varint(rest, bytes) ||
          sender >= at(ranks()) || bytes > rest.size()) {
        refuse(carrier, "message: it carries what cannot be read");
      }
      if (sender != at(rank())) {
        decode_from(carrier, regions.owned[sender], rest.first(bytes), *some);
        // A sender's parts do not overlap; they come in no order.
        (*sums)[0].assign(parts[sender]);
        (*sums)[1].assign(*some);
        workspace_->adder.add(*sums, regions.pieces.back().end, parts[sender]);
      }
      rest = rest.subspan(bytes);
    }
  }
  close(round);
  parts[at(rank())].assign(own);
}

Channel::Round Channel::send(int to, const SparseVector& mine, SparseVector& rounded, int from) {
  Stopwatch watch(seconds(Stage::pack));
  workspace_->payload.clear();
  if (to != kNobody) encode(parameters_, mine, rounded, workspace_->payload);
  return send_payload(to, workspace_->payload, from);
}

Channel::Round Channel::send_payload(int to, std::span<const std::byte> payload, int from) {
  const Round round = next_round(from == kNobody ? 0 : 1);
  if (from != kNobody) comm_->expect(round.tag, from);
  if (to != kNobody) post(round, to, payload);
  return round;
}

void Channel::read(const Round& round, int from, SparseVector& entries) {
  Stopwatch watch(seconds(Stage::unpack));
  decode_from(from, parameters_, payload(round, from), entries);
}

// ---- values ------------------------------------------------------------------------------------

void Channel::post_values(const Round& round, int to, std::span<const std::size_t> lengths,
                          std::span<const float> values, std::span<float> rounded) {
  workspace_->payload.clear();
  make_room(workspace_->payload, kMostAround + 2 * lengths.size() + values.size_bytes());
  finite_ = wire::encode_values(values_, lengths, values, workspace_->payload, rounded) && finite_;
  if (to != kNobody) post(round, to, workspace_->payload);
}

void Channel::post_values_to_all(const Round& round, std::span<const std::size_t> lengths,
                                 std::span<const float> values, std::span<float> rounded) {
  post_values(round, kNobody, lengths, values, rounded);
  post_to_all(round, workspace_->payload);
}

void Channel::read_values(const Round& round, int from, std::span<const std::size_t> lengths,
                          std::span<float> values) {
  const auto bytes = payload(round, from);
  try {
    wire::decode_values(values_, lengths, bytes, values);
  } catch (const WireError& error) {
    refuse(from, error.what());
  }
}

void to_rounding_error(const SparseVector& rounded, SparseVector& exact) {
  std::size_t next = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const bool there = next < rounded.size() && rounded.indices[next] == exact.indices[i];
    exact.values[i] = (there ? rounded.values[next] : 0.0f) - exact.values[i];
    next += there ? 1 : 0;
  }
}

}  // namespace topreduce::exchange
