#include "topreduce/exchange/courier.h"

#include <algorithm>
#include <string>
#include <utility>

#include "topreduce/kernels/kernels.h"

namespace topreduce::exchange {

void Courier::begin(Communicator& comm, StepStats& stats, Threads& threads) {
  comm_ = &comm;
  stats_ = &stats;
  threads_ = &threads;
  vote_ = wire::Vote::yes;
  loss_scale_ = 0;
}

void Courier::open(const wire::Envelope& envelope, const Pending& pending, wire::Vote vote) {
  envelope_ = envelope;
  learn_loss_scale(envelope.loss_scale);
  parameters_.clear();
  for (const Segment& segment : pending.segments()) {
    parameters_.push_back({segment.start, segment.start + static_cast<Index>(segment.size())});
  }
  hear(vote);
}

void Courier::open(const wire::Envelope& envelope, wire::Vote vote) {
  envelope_ = envelope;
  learn_loss_scale(envelope.loss_scale);
  parameters_.assign(1, {0, envelope.universe});
  hear(vote);
}

void Courier::hear(wire::Vote vote) {
  if (vote == wire::Vote::no || (vote == wire::Vote::ask && vote_ == wire::Vote::yes)) {
    vote_ = vote;
  }
}

// What a rank has learnt it hands on: not every rank hears from every other at first hand.
void Courier::learn_loss_scale(float scale) {
  if (loss_scale_ == 0) loss_scale_ = scale;
  if (envelope_.loss_scale == 0) envelope_.loss_scale = scale;
}

void Courier::sort_by_owner(std::span<const Regions::Piece> regions) {
  owned_.resize(static_cast<std::size_t>(ranks()));
  for (auto& pieces : owned_) pieces.clear();
  for (const Regions::Piece& piece : regions) {
    owned_[piece.owner].push_back({piece.begin, piece.end});
  }
}

template <class Read>
void Courier::read_all(Read&& read) {
  for (int r = 0; r < ranks(); ++r) {
    try {
      Stopwatch watch((*stats_)[Stage::unpack]);
      hear(read(r, inbox_.from(r)));
      if (!inbox_.from(r).empty()) learn_loss_scale(wire::loss_scale_of(inbox_.from(r)));
    } catch (const WireError& error) {
      throw WireError("rank " + std::to_string(rank()) + ", step " +
                      std::to_string(envelope_.step) + ", bucket " +
                      std::to_string(envelope_.bucket) + ", message from rank " +
                      std::to_string(r) + ": " + error.what());
    }
  }
}

void Courier::pack(wire::Pieces pieces, SparseVector& entries) {
  make_room(outbox_, outbox_.size() + wire::largest_message(entries.size(), pieces.size()));
  hear(wire::pack(envelope_, pieces, vote_, entries, outbox_));
}

void Courier::send_to_each(std::span<const std::byte> bytes) {
  Stopwatch watch((*stats_)[Stage::network]);
  comm_->all_to_all(bytes, counts_, inbox_);
}

void Courier::send_to_all() {
  Stopwatch watch((*stats_)[Stage::network]);
  comm_->all_gather(outbox_, inbox_);
}

// ---- everyone to everyone ----------------------------------------------------------------------

template <class PiecesOf>
void Courier::gather(SparseVector& mine, PiecesOf&& pieces_of, std::vector<SparseVector>& parts) {
  const auto own = static_cast<std::size_t>(rank());
  parts.resize(static_cast<std::size_t>(ranks()));
  if (ranks() > 1) {
    {
      Stopwatch watch((*stats_)[Stage::pack]);
      outbox_.clear();
      pack(pieces_of(own), mine);
    }
    send_to_all();
    read_all([&](int r, std::span<const std::byte> message) {
      const auto sender = static_cast<std::size_t>(r);
      if (sender == own) return vote_;
      return wire::unpack(envelope_, pieces_of(sender), message, parts[sender]);
    });
  }
  parts[own].assign(mine);
}

void Courier::all_gather(SparseVector& mine, std::vector<SparseVector>& parts) {
  gather(
      mine, [&](std::size_t) { return wire::Pieces(parameters_); }, parts);
}

void Courier::all_gather(SparseVector& mine, std::span<const Regions::Piece> regions,
                         std::vector<SparseVector>& parts) {
  sort_by_owner(regions);
  gather(
      mine, [&](std::size_t r) { return wire::Pieces(owned_[r]); }, parts);
}

void Courier::all_gather_exact(SparseVector& mine, std::vector<SparseVector>& parts) {
  const wire::Values values = std::exchange(envelope_.values, wire::Values::fp32);
  all_gather(mine, parts);
  envelope_.values = values;
}

void Courier::all_gather_spread(std::span<SparseVector> outgoing,
                                std::span<const Regions::Piece> regions,
                                std::vector<SparseVector>& parts) {
  sort_by_owner(regions);
  {
    Stopwatch watch((*stats_)[Stage::pack]);
    outbox_.clear();
    counts_.clear();
    for (SparseVector& part : outgoing) {
      const std::size_t before = outbox_.size();
      pack(owned_[static_cast<std::size_t>(rank())], part);
      counts_.push_back(outbox_.size() - before);
    }
  }
  send_to_each(outbox_);
  outbox_.clear();
  const auto most = static_cast<std::size_t>(ranks());
  read_all([&](int r, std::span<const std::byte> message) {
    make_room(outbox_, outbox_.size() + message.size());
    outbox_.insert(outbox_.end(), message.begin(), message.end());
    passing_.reserve(spread_room_);
    // Read before it is handed on: whoever sent a bad one is known, and the vote is heard.
    const auto sender = static_cast<std::size_t>(r);
    return wire::unpack(envelope_, owned_[sender], wire::first_message(message), passing_);
  });
  send_to_all();
  parts.resize(most * most);
  read_all([&](int r, std::span<const std::byte> messages) {
    for (std::size_t sender = 0; sender < most; ++sender) {
      const auto message = wire::first_message(messages);
      messages = messages.subspan(message.size());
      SparseVector& part = parts[static_cast<std::size_t>(r) * most + sender];
      part.reserve(spread_room_);  // many small parts: what one has had, any may get
      hear(wire::unpack(envelope_, owned_[sender], message, part));
      spread_room_ = std::max(spread_room_, 3 * part.size());
    }
    if (!messages.empty()) {
      throw WireError("message: " + std::to_string(messages.size()) + " bytes more than expected");
    }
    return vote_;
  });
}

// ---- each to each ------------------------------------------------------------------------------

void Courier::all_to_all(std::span<SparseVector> outgoing, std::span<const Regions::Piece> regions,
                         std::vector<SparseVector>& incoming) {
  incoming.resize(outgoing.size());
  const auto own = static_cast<std::size_t>(rank());
  incoming[own].assign(outgoing[own]);
  if (ranks() == 1) return;
  sort_by_owner(regions);
  {
    Stopwatch watch((*stats_)[Stage::pack]);
    outbox_.clear();
    counts_.assign(outgoing.size(), 0);
    for (std::size_t r = 0; r < outgoing.size(); ++r) {
      if (r == own) continue;
      const std::size_t before = outbox_.size();
      pack(owned_[r], outgoing[r]);
      counts_[r] = outbox_.size() - before;
    }
  }
  send_to_each(outbox_);
  read_all([&](int r, std::span<const std::byte> message) {
    if (r == rank()) return vote_;
    return wire::unpack(envelope_, owned_[own], message, incoming[static_cast<std::size_t>(r)]);
  });
}

void Courier::pass(int to, SparseVector& mine, int from, SparseVector& received) {
  {
    Stopwatch watch((*stats_)[Stage::pack]);
    outbox_.clear();
    counts_.assign(static_cast<std::size_t>(ranks()), 0);
    if (to != kNobody) {
      pack(parameters_, mine);
      counts_[static_cast<std::size_t>(to)] = outbox_.size();
    }
  }
  send_to_each(outbox_);
  receive_from(from, received);
}

void Courier::receive_from(int from, SparseVector& received) {
  received.clear();
  read_all([&](int r, std::span<const std::byte> message) {
    if (r == from) return wire::unpack(envelope_, parameters_, message, received);
    if (!message.empty()) {
      throw WireError("message: " + std::to_string(message.size()) + " bytes, expected none");
    }
    return vote_;
  });
}

void Courier::keep(SparseVector& entries) {
  if (ranks() == 1) return;
  Stopwatch watch((*stats_)[Stage::pack]);
  outbox_.clear();
  pack(parameters_, entries);
  std::swap(outbox_, kept_);
}

void Courier::pass_on(int to, int from, SparseVector& received) {
  counts_.assign(static_cast<std::size_t>(ranks()), 0);
  if (to != kNobody) counts_[static_cast<std::size_t>(to)] = kept_.size();
  send_to_each(to != kNobody ? std::span<const std::byte>(kept_) : std::span<const std::byte>());
  receive_from(from, received);
  if (from == kNobody) return;
  const auto message = inbox_.from(from);
  make_room(kept_, message.size());
  kept_.assign(message.begin(), message.end());
}

// ---- sums at places that all ranks know --------------------------------------------------------

void Courier::all_reduce(const Pending& pending, std::span<const Index> places,
                         std::span<float> values, std::span<float> settled) {
  const auto parts = static_cast<std::size_t>(ranks());
  cuts_.clear();
  make_room(cuts_, pending.segments().size() * parts + 1);
  for (const Segment& segment : pending.segments()) {
    for (std::size_t r = 0; r < parts; ++r) {
      const auto cut = static_cast<Index>(segment.start + segment.size() * r / parts);
      const auto found = std::ranges::lower_bound(places, cut) - places.begin();
      cuts_.push_back(places.empty() ? std::min<std::size_t>(cut, values.size())
                                     : static_cast<std::size_t>(found));
    }
  }
  cuts_.push_back(values.size());
  reduce_parts(values, settled);
}

void Courier::all_reduce(std::span<float> values, std::span<float> settled) {
  const auto parts = static_cast<std::size_t>(ranks());
  cuts_.clear();
  for (std::size_t r = 0; r <= parts; ++r) cuts_.push_back(values.size() * r / parts);
  const wire::Values given =
      std::exchange(envelope_.values, wire::without_scales(envelope_.values));
  reduce_parts(values, settled);
  envelope_.values = given;
}

void Courier::list_lengths(int r) {
  make_room(lengths_, cuts_.size());
  lengths_.clear();
  for_each_piece(r,
                 [&](std::size_t, std::size_t, std::size_t length) { lengths_.push_back(length); });
}

template <class Visit>
void Courier::for_each_piece(int r, Visit&& visit) {
  std::size_t place = 0;
  for (auto i = static_cast<std::size_t>(r); i + 1 < cuts_.size();
       i += static_cast<std::size_t>(ranks())) {
    const std::size_t length = cuts_[i + 1] - cuts_[i];
    visit(cuts_[i], place, length);
    place += length;
  }
}

void Courier::reduce_parts(std::span<float> values, std::span<float> settled) {
  if (ranks() == 1) {
    std::ranges::copy(values.first(settled.size()), settled.begin());
    return;
  }
  const auto load = [&](int r, Buffer<float>& part) {
    make_room(part, values.size() / static_cast<std::size_t>(ranks()) + cuts_.size());
    part.resize(0);
    for_each_piece(r, [&](std::size_t start, std::size_t, std::size_t length) {
      const auto piece = values.subspan(start, length);
      part.insert(part.end(), piece.begin(), piece.end());
    });
  };
  const auto store = [&](int r, const Buffer<float>& part, std::span<float> target) {
    for_each_piece(r, [&](std::size_t start, std::size_t place, std::size_t length) {
      std::ranges::copy(std::span(part).subspan(place, length),
                        target.begin() + static_cast<std::ptrdiff_t>(start));
    });
  };
  {
    Stopwatch watch((*stats_)[Stage::pack]);
    outbox_.clear();
    make_room(outbox_, static_cast<std::size_t>(ranks()) * wire::largest_message(0, 0) +
                           4 * cuts_.size() + values.size() * sizeof(float));
    counts_.clear();
    for (int r = 0; r < ranks(); ++r) {
      const std::size_t before = outbox_.size();
      load(r, part_);
      list_lengths(r);
      hear(wire::pack_stretch(envelope_, lengths_, vote_, part_, outbox_));
      counts_.push_back(outbox_.size() - before);
      if (!settled.empty()) store(r, part_, settled);
    }
  }
  send_to_each(outbox_);
  load(rank(), sum_);  // for its size
  make_room(part_, sum_.size());
  part_.resize(sum_.size());
  list_lengths(rank());
  read_all([&](int r, std::span<const std::byte> message) {
    const wire::Vote vote =
        wire::unpack_stretch(envelope_, lengths_, message, r == 0 ? sum_ : part_);
    if (r > 0) kernels::add(sum_, part_);
    return vote;
  });
  {
    Stopwatch watch((*stats_)[Stage::pack]);
    std::ranges::copy(sum_, part_.begin());
    outbox_.clear();
    hear(wire::pack_stretch(envelope_, lengths_, vote_, sum_, outbox_));
    store(rank(), sum_, values);
    // The owner rounds the sum for everyone, so the owner owes what that changed.
    if (!settled.empty()) {
      for_each_piece(rank(), [&](std::size_t start, std::size_t place, std::size_t length) {
        for (std::size_t i = 0; i < length; ++i) {
          settled[start + i] += sum_[place + i] - part_[place + i];
        }
      });
    }
  }
  send_to_all();
  read_all([&](int r, std::span<const std::byte> message) {
    if (r == rank()) return vote_;
    load(r, part_);  // for its size
    list_lengths(r);
    const wire::Vote vote = wire::unpack_stretch(envelope_, lengths_, message, part_);
    store(r, part_, values);
    return vote;
  });
}

void take_from(const SparseVector& rounded, SparseVector& exact) {
  std::size_t next = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const bool there = next < rounded.size() && rounded.indices[next] == exact.indices[i];
    exact.values[i] = (there ? rounded.values[next] : 0.0f) - exact.values[i];
    next += there ? 1 : 0;
  }
}

}  // namespace topreduce::exchange
