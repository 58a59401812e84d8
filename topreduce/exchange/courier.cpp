#include "topreduce/exchange/courier.h"

#include <algorithm>
#include <string>

#include "topreduce/kernels/kernels.h"
#include "topreduce/wire/values.h"

namespace topreduce::exchange {
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
  if (vote == wire::Vote::no || (vote == wire::Vote::ask && vote_ == wire::Vote::yes)) {
    vote_ = vote;
  }
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

void Courier::all_gather_regions(SparseVector& mine, std::span<const std::size_t> sizes,
                                 std::vector<SparseVector>& parts) {
  parts.resize(static_cast<std::size_t>(ranks()));
  const auto own = static_cast<std::size_t>(rank());
  parts[own].assign(mine);
  if (ranks() == 1) return;
  {
    Stopwatch watch((*stats_)[Stage::pack]);
    outbox_.clear();
    make_room(outbox_, wire::largest_message(mine.size(), envelope_.values));
    wire::pack(envelope_, vote_, mine, outbox_);
    if (outbox_.size() > wire::stretch_message(sizes[own], envelope_.values)) {
      make_room(part_, sizes[own]);
      part_.assign(sizes[own], 0.0f);
      for (std::size_t i = 0; i < mine.size(); ++i) part_[mine.indices[i]] = mine.values[i];
      outbox_.clear();
      wire::pack_stretch(envelope_, vote_, part_, outbox_);
    }
  }
  {
    Stopwatch watch((*stats_)[Stage::network]);
    comm_->all_gather(outbox_, inbox_);
  }
  read_all([&](int r, std::span<const std::byte> message) {
    const auto sender = static_cast<std::size_t>(r);
    if (sender == own) return vote_;
    SparseVector& part = parts[sender];
    if (!wire::is_stretch(message)) {
      const wire::Vote vote = wire::unpack(envelope_, message, part);
      if (!part.empty() && part.indices.back() >= sizes[sender]) {
        throw WireError("message: index " + std::to_string(part.indices.back()) +
                        " in a region of " + std::to_string(sizes[sender]));
      }
      return vote;
    }
    make_room(part_, sizes[sender]);
    part_.resize(sizes[sender]);
    const wire::Vote vote = wire::unpack_stretch(envelope_, message, part_);
    part.resize(part_.size());
    std::size_t count = 0;
    for (std::size_t i = 0; i < part_.size(); ++i) {
      if (part_[i] == 0) continue;
      part.indices[count] = static_cast<Index>(i);
      part.values[count++] = part_[i];
    }
    part.resize(count);
    return vote;
  });
}

void Courier::round(std::span<float> values) {
  if (!rounds_values()) return;
  Stopwatch watch((*stats_)[Stage::pack]);
  make_room(outbox_, values.size() * wire::width(envelope_.values));
  outbox_.resize(values.size() * wire::width(envelope_.values));
  wire::encode_values(envelope_.values, values, outbox_.data());
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
    std::size_t most = 0;
    for (const SparseVector& part : outgoing) {
      most += wire::largest_message(part.size(), envelope_.values);
    }
    make_room(outbox_, most);
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
      make_room(outbox_, wire::largest_message(mine.size(), envelope_.values));
      wire::pack(envelope_, vote_, mine, outbox_);
      counts_[static_cast<std::size_t>(to)] = outbox_.size();
    }
  }
  send_to_each();
  read_all([&](int r, std::span<const std::byte> message) {
    if (r == from) return wire::unpack(envelope_, message, received);
    if (!message.empty()) {
      throw WireError("message: " + std::to_string(message.size()) + " bytes, expected none");
    }
    return vote_;
  });
}

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
  reduce_parts(values, settled);
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
    make_room(outbox_,
              static_cast<std::size_t>(ranks()) * wire::largest_message(0, envelope_.values) +
                  values.size() * sizeof(float));
    counts_.clear();
    for (int r = 0; r < ranks(); ++r) {
      const std::size_t before = outbox_.size();
      load(r, part_);
      wire::pack_stretch(envelope_, vote_, part_, outbox_);
      counts_.push_back(outbox_.size() - before);
      if (!settled.empty()) store(r, part_, settled);
    }
  }
  send_to_each();
  load(rank(), sum_);  // for its size
  part_.resize(sum_.size());
  read_all([&](int r, std::span<const std::byte> message) {
    const wire::Vote vote = wire::unpack_stretch(envelope_, message, r == 0 ? sum_ : part_);
    if (r > 0) kernels::add(sum_, part_);
    return vote;
  });
  {
    Stopwatch watch((*stats_)[Stage::pack]);
    std::ranges::copy(sum_, part_.begin());
    outbox_.clear();
    wire::pack_stretch(envelope_, vote_, sum_, outbox_);
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
  {
    Stopwatch watch((*stats_)[Stage::network]);
    comm_->all_gather(outbox_, inbox_);
  }
  read_all([&](int r, std::span<const std::byte> message) {
    if (r == rank()) return vote_;
    load(r, part_);  // for its size
    const wire::Vote vote = wire::unpack_stretch(envelope_, message, part_);
    store(r, part_, values);
    return vote;
  });
}

}  // namespace topreduce::exchange
