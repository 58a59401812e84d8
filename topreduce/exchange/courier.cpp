#include "topreduce/exchange/courier.h"

#include <algorithm>
#include <string>

#include "topreduce/kernels/kernels.h"

namespace topreduce::exchange {
namespace {

// Part of [0, size) that rank r adds up and hands round.
std::size_t part_start(std::size_t size, int r, int ranks) {
  return size * static_cast<std::size_t>(r) / static_cast<std::size_t>(ranks);
}

}  // namespace

void Courier::begin(Communicator& comm, StepStats& stats) {
  comm_ = &comm;
  stats_ = &stats;
  vote_ = wire::Vote::yes;
}

void Courier::open(const wire::Envelope& envelope, wire::Vote vote) {
  envelope_ = envelope;
  hear(vote);
}

void Courier::hear(wire::Vote vote) {
  if (vote == wire::Vote::no) vote_ = wire::Vote::no;
}

template <class Read>
void Courier::read_all(Read&& read) {
  for (int r = 0; r < ranks(); ++r) {
    try {
      Stopwatch watch((*stats_)[Stage::unpack]);
      hear(read(r, inbox_.from(r)));
    } catch (const WireError& error) {
      throw WireError("rank " + std::to_string(rank()) + ", step " +
                      std::to_string(envelope_.step) + ", bucket " +
                      std::to_string(envelope_.bucket) + ", message from rank " +
                      std::to_string(r) + ": " + error.what());
    }
  }
}

void Courier::all_gather(SparseVector& mine, std::vector<SparseVector>& parts) {
  parts.resize(static_cast<std::size_t>(ranks()));
  if (ranks() == 1) {
    parts[0].assign(mine);
    return;
  }
  {
    Stopwatch watch((*stats_)[Stage::pack]);
    outbox_.clear();
    make_room(outbox_, wire::largest_message(mine.size(), envelope_.values));
    wire::pack(envelope_, vote_, mine, outbox_);
  }
  {
    Stopwatch watch((*stats_)[Stage::network]);
    comm_->all_gather(outbox_, inbox_);
  }
  read_all([&](int r, std::span<const std::byte> message) {
    SparseVector& part = parts[static_cast<std::size_t>(r)];
    if (r != rank()) return wire::unpack(envelope_, message, part);
    part.assign(mine);
    return vote_;
  });
}

void Courier::send_to_each() {
  Stopwatch watch((*stats_)[Stage::network]);
  comm_->all_to_all(outbox_, counts_, inbox_);
}

void Courier::all_to_all(std::span<SparseVector> outgoing, std::vector<SparseVector>& incoming) {
  incoming.resize(outgoing.size());
  const auto own = static_cast<std::size_t>(rank());
  incoming[own].assign(outgoing[own]);
  if (ranks() == 1) return;
  {
    Stopwatch watch((*stats_)[Stage::pack]);
    outbox_.clear();
    counts_.assign(outgoing.size(), 0);
    for (std::size_t r = 0; r < outgoing.size(); ++r) {
      if (r == own) continue;
      const std::size_t before = outbox_.size();
      wire::pack(envelope_, vote_, outgoing[r], outbox_);
      counts_[r] = outbox_.size() - before;
    }
  }
  send_to_each();
  read_all([&](int r, std::span<const std::byte> message) {
    return r == rank() ? vote_
                       : wire::unpack(envelope_, message, incoming[static_cast<std::size_t>(r)]);
  });
}

void Courier::pass(int to, SparseVector& mine, int from, SparseVector& received) {
  received.clear();
  {
    Stopwatch watch((*stats_)[Stage::pack]);
    outbox_.clear();
    counts_.assign(static_cast<std::size_t>(ranks()), 0);
    if (to != kNobody) {
      wire::pack(envelope_, vote_, mine, outbox_);
      counts_[static_cast<std::size_t>(to)] = outbox_.size();
    }
  }
  send_to_each();
  read_all([&](int r, std::span<const std::byte> message) {
    return r == from ? wire::unpack(envelope_, message, received) : vote_;
  });
}

void Courier::all_reduce(std::span<float> values, std::span<float> settled) {
  if (ranks() == 1) {
    std::ranges::copy(values.first(settled.size()), settled.begin());
    return;
  }
  const std::size_t size = values.size();
  const auto part = [&](int r) {
    const std::size_t start = part_start(size, r, ranks());
    return values.subspan(start, part_start(size, r + 1, ranks()) - start);
  };
  {
    Stopwatch watch((*stats_)[Stage::pack]);
    outbox_.clear();
    make_room(outbox_,
              static_cast<std::size_t>(ranks()) * wire::largest_message(0, envelope_.values) +
                  size * sizeof(float));
    counts_.clear();
    for (int r = 0; r < ranks(); ++r) {
      const std::size_t before = outbox_.size();
      wire::pack_stretch(envelope_, vote_, part(r), outbox_);
      counts_.push_back(outbox_.size() - before);
    }
    std::ranges::copy(values.first(settled.size()), settled.begin());
  }
  send_to_each();
  const std::span<float> owned = part(rank());
  make_room(part_, owned.size());
  part_.resize(owned.size());
  read_all([&](int r, std::span<const std::byte> message) {
    const wire::Vote vote = wire::unpack_stretch(envelope_, message, part_);
    if (r == 0) {
      std::ranges::copy(part_, owned.begin());
    } else {
      kernels::add(owned, part_);
    }
    return vote;
  });
  {
    Stopwatch watch((*stats_)[Stage::pack]);
    std::ranges::copy(owned, part_.begin());
    outbox_.clear();
    wire::pack_stretch(envelope_, vote_, owned, outbox_);
    if (!settled.empty()) {
      // The owner rounds the sum for everyone, so the owner owes what that changed.
      const std::span<float> mine =
          settled.subspan(part_start(size, rank(), ranks()), owned.size());
      for (std::size_t i = 0; i < owned.size(); ++i) mine[i] += owned[i] - part_[i];
    }
  }
  {
    Stopwatch watch((*stats_)[Stage::network]);
    comm_->all_gather(outbox_, inbox_);
  }
  read_all([&](int r, std::span<const std::byte> message) {
    return r == rank() ? vote_ : wire::unpack_stretch(envelope_, message, part(r));
  });
}

}  // namespace topreduce::exchange
