#pragma once

#include <cstdio>
#include <cstring>

#include "tests/cluster.h"
#include "topreduce/comm/mpi.h"

// A cluster whose ranks are the processes of an MPI job. Every process holds a reducer for every
// rank; it steps its own, and the others take over the state that their ranks came to.

namespace topreduce::laws {

/// An Outcome as bytes, there and back: the same walk packs and unpacks.
class Freight {
 public:
  explicit Freight(std::span<const std::byte> bytes) : unpacked_(bytes) {}
  Freight() = default;

  const Bytes& bytes() const { return packed_; }

  void carry(Outcome& outcome) {
    carry(outcome.gradient);
    carry(outcome.owed);
    carry(outcome.error);
    flat(outcome.stats);
    flat(outcome.traffic);
    std::size_t entries = outcome.state.size();
    flat(entries);
    auto next = outcome.state.begin();
    for (std::size_t i = 0; i < entries; ++i) {
      std::string name = packing() ? next->first : "";
      carry(name);
      carry(outcome.state[name]);
      if (packing()) ++next;
    }
  }

 private:
  bool packing() const { return unpacked_.data() == nullptr; }

  template <class Values>
  void carry(Values& values) {
    std::size_t count = values.size();
    flat(count);
    values.resize(count);
    move(values.data(), count * sizeof(values[0]));
  }
  template <class Value>
  void flat(Value& value) {
    static_assert(std::is_trivially_copyable_v<Value>);
    move(&value, sizeof(value));
  }
  void move(void* place, std::size_t size) {
    if (size == 0) return;
    if (packing()) {
      const auto* first = static_cast<const std::byte*>(place);
      packed_.insert(packed_.end(), first, first + size);
    } else {
      std::memcpy(place, unpacked_.data(), size);
      unpacked_ = unpacked_.subspan(size);
    }
  }

  Bytes packed_;
  std::span<const std::byte> unpacked_;
};

/// All processes of the job.
inline comm::Mpi& job() {
  static auto* const comm = new comm::Mpi;  // never destroyed: MPI ends before statics do
  return *comm;
}

inline std::vector<Outcome> meet_as_processes(std::span<Reducer> reducers, const Turn& turn) {
  comm::Mpi& comm = job();
  if (reducers.size() != static_cast<std::size_t>(comm.size())) {
    throw std::logic_error("a cluster of " + std::to_string(reducers.size()) +
                           " ranks in a job of " + std::to_string(comm.size()));
  }
  std::vector<Outcome> outcomes(reducers.size());
  const auto me = static_cast<std::size_t>(comm.rank());
  outcomes[me] = turn(reducers[me], comm);
  Freight mine;
  mine.carry(outcomes[me]);
  comm::Inbox inbox;
  comm.all_gather(mine.bytes(), inbox);
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    if (r == me) continue;
    Freight(inbox.from(static_cast<int>(r))).carry(outcomes[r]);
    Loader loader(outcomes[r].state);
    reducers[r].visit(loader);
  }
  return outcomes;
}

/// Prints what fails, with the rank it failed on.
class OnlyFailures final : public testing::EmptyTestEventListener {
 public:
  explicit OnlyFailures(int rank) : rank_(rank) {}
  void OnTestPartResult(const testing::TestPartResult& part) override {
    if (!part.failed()) return;
    std::printf("rank %d, %s:%d: %s\n", rank_, part.file_name(), part.line_number(),
                part.message());
    std::fflush(stdout);
  }

 private:
  int rank_;
};

}  // namespace topreduce::laws
