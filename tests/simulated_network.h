#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <queue>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "topreduce/comm/communicator.h"

// A network that is not there: ranks are threads that run the real code and send real bytes, but
// time is counted, not measured. What each rank does takes no time, or the time of a core that all
// ranks share; what it sends waits for the ports on its way:
//
//   rank -> port of its host, as slow as its link -> latency -> port of the other host -> rank
//   rank -> port inside -----------------------------------> port inside -----------------> rank
//
// Frames to several ranks share a port in turns, as TCP connections do. An event happens when all
// ranks wait, the earliest first, and wakes one of them at most: one runs at a time. So a run
// without processors gives the same times again.

namespace topreduce::simulated {

using comm::at;

/// One way through a port; `burst` is what may pass at once after a pause, as through tc's tbf.
struct Link {
  double rate = std::numeric_limits<double>::infinity();  // bytes per second
  double latency = 0;                                     // seconds
  double burst = 0;                                       // bytes
};

/// Cores that all ranks share, as in a lab on one machine. A rank that wakes up takes the one that
/// is free first, for as long as its thread computes and the system sends or receives its frames.
struct Processors {
  std::size_t cores = 0;  // none: all of that takes no time
  double per_frame = 0;   // seconds of the system, at either end
  double per_byte = 0;
};

struct Topology {
  std::vector<std::size_t> host_of;  // by rank
  std::vector<Link> links;           // by host, both ways
  Link inside;                       // between ranks of one host
  Processors processors;
};

inline Topology hosts(std::size_t count, const Link& link, std::size_t ranks_each = 1) {
  Topology topology;
  topology.links.assign(count, link);
  for (std::size_t r = 0; r < count * ranks_each; ++r) topology.host_of.push_back(r / ranks_each);
  return topology;
}

/// Bytes on the wire of so many in a TCP stream: headers of Ethernet, IP and TCP with a time stamp
/// in every packet, and half an acknowledgement on the way back, which is as busy.
inline double on_the_wire(std::size_t bytes) {
  constexpr std::size_t kPacket = 1448, kHeaders = 66 + 33;
  return static_cast<double>(bytes + (bytes + kPacket - 1) / kPacket * kHeaders);
}

class Network {
 public:
  explicit Network(Topology topology);

  /// A rank's own end. Besides what every communicator does it knows the time.
  class Rank final : public Communicator {
   public:
    Rank(Network& network, int rank)
        : Communicator(rank, static_cast<int>(network.topology_.host_of.size())),
          network_(network) {}
    double now();
    /// Waits: true if it is `time`, false if something came before, which wants to be looked at.
    bool wait_until(double time);
    /// Computes for so long, besides what is really computed here: nothing if cores cost nothing.
    void work(double seconds);
    /// What the processor did until now took no time.
    void restart_processor() { cpu_ = cpu_seconds(); }

   protected:
    void send_frame(int peer, std::span<const std::byte> frame) override;
    bool receive_frames() override;
    void pause(const comm::Backoff&) override { network_.sleep(*this); }

   private:
    friend class Network;
    enum class State : std::uint8_t { running, waiting, done };
    void count_processor();
    void count_frame(std::size_t bytes);
    static double cpu_seconds();

    Network& network_;
    double clock_ = 0, cpu_ = 0;
    double alarm_ = 0;  // the last one that was set
    State state_ = State::running;
    std::size_t core_ = 0;
    std::vector<std::pair<int, Bytes>> inbox_;   // delivered, not yet taken
    std::vector<std::pair<int, Bytes>> taking_;  // those that are being taken
    std::condition_variable woken_;
  };

  /// Runs `body` once per rank and waits for all; the first exception is thrown again.
  void run(const std::function<void(Rank&)>& body);

 private:
  enum class Kind : std::uint8_t { port_free, head, delivered, sent, alarm };
  struct Event {
    double time;
    Kind kind;
    int from, to = -1;  // ranks; port_free: a port
    double wire = 0;    // head: bytes of this piece
    double end = 0;     // head: when the last of them may be there
    bool last = false;  // head: of its frame
    auto key() const { return std::tie(time, kind, from, to, end, wire); }
    bool operator<(const Event& other) const { return key() > other.key(); }  // earliest on top
  };
  struct Frame {
    Frame(auto begin, auto end) : bytes(begin, end), wire(on_the_wire(bytes.size())) {}
    Bytes bytes;
    double wire, left = wire;
  };
  struct Flow {  // from a rank to another
    std::list<Frame> posted, waiting, under_way;
  };
  struct Port {
    explicit Port(const Link& way) : link(way) {}
    Link link;
    double busy_until = 0;  // if nothing could pass in a burst
    bool sending = false;
    std::deque<std::size_t> turns;  // flows that wait
  };
  static constexpr double kPiece = 4096;  // bytes, or an eighth of a long frame
  static constexpr double kPieces = 8;

  std::size_t ranks() const { return topology_.host_of.size(); }
  std::size_t flow_of(int from, int to) const { return at(from) * ranks() + at(to); }
  bool is_inside(int from, int to) const {
    return topology_.host_of[at(from)] == topology_.host_of[at(to)];
  }
  std::size_t way_out(int from, int to) const {
    return is_inside(from, to) ? 2 * topology_.links.size() + at(from)
                               : topology_.host_of[at(from)];
  }
  std::size_t way_in(int from, int to) const {
    return is_inside(from, to) ? 2 * topology_.links.size() + ranks() + at(to)
                               : topology_.links.size() + topology_.host_of[at(to)];
  }
  static double pass(Port& port, double time, double wire);
  void send(Rank& from, int to, std::span<const std::byte> frame);
  void sleep(Rank& rank);
  void stop_running(Rank& rank, Rank::State state);
  void fail(const std::exception_ptr& failure);
  void wake(Rank& rank, double time);
  void happen(const Event& event);
  void start_piece(std::size_t number, double time);

  Topology topology_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Rank>> members_;
  std::vector<Flow> flows_;
  std::vector<Port> ports_;        // of hosts: out, in; of ranks, inside their host: out, in
  std::vector<double> free_from_;  // by core
  std::priority_queue<Event> events_;
  std::size_t running_ = 0;
  std::exception_ptr failure_;
};

// ---- ranks -------------------------------------------------------------------------------------

inline double Network::Rank::cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

inline void Network::Rank::count_processor() {
  if (network_.topology_.processors.cores == 0) return;
  const double before = std::exchange(cpu_, cpu_seconds());
  clock_ += cpu_ - before;
}

inline void Network::Rank::count_frame(std::size_t bytes) {
  const Processors& each = network_.topology_.processors;
  if (each.cores == 0) return;
  clock_ += each.per_frame + each.per_byte * static_cast<double>(bytes);
}

inline void Network::Rank::work(double seconds) {
  if (network_.topology_.processors.cores > 0) clock_ += seconds;
}

inline double Network::Rank::now() {
  count_processor();
  return clock_;
}

inline bool Network::Rank::wait_until(double time) {
  if (now() >= time) return true;
  flush();
  {
    const std::lock_guard lock(network_.mutex_);
    if (!inbox_.empty()) return false;
    if (std::exchange(alarm_, time) != time) {
      network_.events_.push({.time = time, .kind = Kind::alarm, .from = rank()});
    }
  }
  network_.sleep(*this);
  return clock_ >= time;
}

inline void Network::Rank::send_frame(int peer, std::span<const std::byte> frame) {
  count_frame(frame.size());
  network_.send(*this, peer, frame);
}

inline bool Network::Rank::receive_frames() {
  {
    const std::lock_guard lock(network_.mutex_);
    taking_.swap(inbox_);
  }
  for (auto& [peer, frame] : taking_) {
    count_frame(frame.size());
    mailbox().accept(peer, frame);
  }
  taking_.clear();
  return true;
}

// ---- the network -------------------------------------------------------------------------------

inline Network::Network(Topology topology) : topology_(std::move(topology)) {
  flows_.resize(ranks() * ranks());
  free_from_.resize(topology_.processors.cores);
  for (int way = 0; way < 2; ++way) {
    for (const Link& link : topology_.links) ports_.emplace_back(link);
  }
  for (std::size_t i = 0; i < 2 * ranks(); ++i) ports_.emplace_back(topology_.inside);
  for (std::size_t r = 0; r < ranks(); ++r) {
    members_.push_back(std::make_unique<Rank>(*this, static_cast<int>(r)));
  }
}

inline void Network::run(const std::function<void(Rank&)>& body) {
  {
    std::vector<std::jthread> threads;
    for (const auto& member : members_) {
      events_.push({.time = 0, .kind = Kind::alarm, .from = member->rank()});
    }
    running_ = ranks();  // each of them goes to sleep first
    for (const auto& member : members_) {
      threads.emplace_back([this, &body, &rank = *member] {
        rank.restart_processor();
        std::exception_ptr failure;
        try {
          sleep(rank);
          body(rank);
        } catch (...) {
          failure = std::current_exception();
        }
        const std::lock_guard lock(mutex_);
        if (failure) fail(failure);
        rank.count_processor();
        stop_running(rank, Rank::State::done);
      });
    }
  }
  if (failure_) std::rethrow_exception(failure_);
}

inline void Network::fail(const std::exception_ptr& failure) {
  if (!failure_) failure_ = failure;
  for (const auto& each : members_) wake(*each, 0);
}

inline void Network::send(Rank& from, int to, std::span<const std::byte> frame) {
  const double time = from.now();
  const std::lock_guard lock(mutex_);
  flows_[flow_of(from.rank(), to)].posted.emplace_back(frame.begin(), frame.end());
  events_.push({.time = time, .kind = Kind::sent, .from = from.rank(), .to = to});
}

inline void Network::sleep(Rank& rank) {
  rank.count_processor();
  std::unique_lock lock(mutex_);
  if (rank.inbox_.empty() && !failure_) {
    stop_running(rank, Rank::State::waiting);
    rank.woken_.wait(lock, [&] { return rank.state_ == Rank::State::running; });
  }
  if (failure_) throw CommError("simulated network: another rank has failed");
  rank.restart_processor();
}

inline void Network::stop_running(Rank& rank, Rank::State state) {
  rank.state_ = state;
  if (!free_from_.empty()) free_from_[rank.core_] = std::max(free_from_[rank.core_], rank.clock_);
  if (--running_ > 0) return;
  while (running_ == 0 && !events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    happen(event);
  }
  const auto waits = [](const auto& each) { return each->state_ == Rank::State::waiting; };
  if (running_ == 0 && std::ranges::any_of(members_, waits)) {
    fail(std::make_exception_ptr(
        CommError("simulated network: a rank waits, but nothing is under way")));
  }
}

inline void Network::wake(Rank& rank, double time) {
  if (rank.state_ != Rank::State::waiting) return;
  rank.clock_ = std::max(rank.clock_, time);
  if (!free_from_.empty()) {
    const auto first = std::ranges::min_element(free_from_);
    rank.core_ = static_cast<std::size_t>(first - free_from_.begin());
    rank.clock_ = std::max(rank.clock_, *first);
  }
  rank.state_ = Rank::State::running;
  ++running_;
  rank.woken_.notify_one();
}

/// When the last of so many bytes is through that come at `time`.
inline double Network::pass(Port& port, double time, double wire) {
  port.busy_until = std::max(port.busy_until, time) + wire / port.link.rate;
  return std::max(time, port.busy_until - port.link.burst / port.link.rate);
}

inline void Network::happen(const Event& event) {
  Flow* const flow = event.to < 0 ? nullptr : &flows_[flow_of(event.from, event.to)];
  switch (event.kind) {
    case Kind::sent: {
      const std::size_t port = way_out(event.from, event.to);
      if (flow->waiting.empty()) ports_[port].turns.push_back(flow_of(event.from, event.to));
      flow->waiting.splice(flow->waiting.end(), flow->posted, flow->posted.begin());
      if (!ports_[port].sending) start_piece(port, event.time);
      return;
    }
    case Kind::port_free:
      ports_[static_cast<std::size_t>(event.from)].sending = false;
      start_piece(static_cast<std::size_t>(event.from), event.time);
      return;
    case Kind::head: {
      Port& port = ports_[way_in(event.from, event.to)];
      const double here = std::max(event.end, pass(port, event.time, event.wire));
      if (event.last) {
        events_.push({.time = here, .kind = Kind::delivered, .from = event.from, .to = event.to});
      }
      return;
    }
    case Kind::delivered: {
      Rank& receiver = *members_[at(event.to)];
      receiver.inbox_.emplace_back(event.from, std::move(flow->under_way.front().bytes));
      flow->under_way.pop_front();
      wake(receiver, event.time);
      return;
    }
    case Kind::alarm:
      // One that is no longer waited for must not move the clock of a rank that computes.
      if (members_[at(event.from)]->alarm_ == event.time)
        wake(*members_[at(event.from)], event.time);
      return;
  }
}

inline void Network::start_piece(std::size_t number, double time) {
  Port& port = ports_[number];
  if (port.turns.empty()) return;
  const std::size_t id = port.turns.front();
  port.turns.pop_front();
  Flow& flow = flows_[id];
  Frame& frame = flow.waiting.front();
  const double wire = std::min(frame.left, std::max(kPiece, frame.wire / kPieces));
  frame.left -= wire;
  const bool last = frame.left <= 0;
  const double end = pass(port, time, wire);
  port.sending = true;
  events_.push({.time = end, .kind = Kind::port_free, .from = static_cast<int>(number)});
  events_.push({.time = time + port.link.latency,
                .kind = Kind::head,
                .from = static_cast<int>(id / ranks()),
                .to = static_cast<int>(id % ranks()),
                .wire = wire,
                .end = end + port.link.latency,
                .last = last});
  if (last) flow.under_way.splice(flow.under_way.end(), flow.waiting, flow.waiting.begin());
  if (!flow.waiting.empty()) port.turns.push_back(id);
}

}  // namespace topreduce::simulated
