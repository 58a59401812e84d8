#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>
#include <nanobind/typing.h>

#include "bindings.h"
#include "topreduce/comm/communicator.h"
#include "topreduce/comm/decorator.h"
#include "topreduce/comm/sockets.h"
#include "topreduce/comm/thread.h"

namespace nb = nanobind;
using namespace nb::literals;
using topreduce::Bytes;
using topreduce::CommError;
using topreduce::WireError;
using topreduce::comm::at;
using topreduce::comm::Backoff;
using topreduce::comm::Communicator;
using topreduce::comm::Decorator;
using topreduce::comm::Inbox;
using topreduce::comm::Loss;
using topreduce::comm::Phase;
using topreduce::comm::Place;
using topreduce::comm::Sockets;
using topreduce::comm::Tag;

namespace {

using ByteArray = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatArray = nb::ndarray<nb::numpy, float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ReadableBytes =
    nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// ---- transports written in Python ---------------------------------------------------------------

// A view that lives as long as the call it is handed to.
nb::object view(std::span<const std::byte> bytes) {
  auto* data = const_cast<std::byte*>(bytes.data());
  return nb::cast(ByteArray(data, {bytes.size()}), nb::rv_policy::reference);
}

// It subclasses Communicator and implements send_frame. Its methods are called with the GIL, from
// whichever thread uses the communicator.
class PythonCommunicator final : public Communicator {
 public:
  PythonCommunicator(int rank, int size, std::size_t frame_limit)
      : Communicator(rank, size), frame_limit_(frame_limit) {
    if (frame_limit <= topreduce::comm::Mailbox::kFrameHead) {
      throw std::invalid_argument("communicator: frames must have more than " +
                                  std::to_string(topreduce::comm::Mailbox::kFrameHead) +
                                  " bytes, not at most " + std::to_string(frame_limit));
    }
  }

  bool has_native_all_reduce() const override {
    const nb::gil_scoped_acquire gil;
    return implements("native_all_reduce");
  }

  /// From now on frames go by these sockets, by rank, without a call of Python.
  void connect(std::vector<int> sockets) {
    if (sockets.size() != at(size())) {
      throw std::invalid_argument("connect: one socket for each of " + std::to_string(size()) +
                                  " ranks, not " + std::to_string(sockets.size()));
    }
    auto connected = std::make_shared<Sockets>(std::move(sockets));
    const std::lock_guard lock(mutex_);
    sockets_.swap(connected);
  }
  void disconnect() {
    std::shared_ptr<Sockets> gone;
    const std::lock_guard lock(mutex_);
    gone.swap(sockets_);
  }
  std::shared_ptr<Sockets> sockets() const {
    const std::lock_guard lock(mutex_);
    return sockets_;
  }

  /// The last word to all peers; returns those that may miss it.
  std::vector<int> say(std::string_view word, double seconds) {
    const auto connected = sockets();
    if (!connected) return {};
    const auto bytes = std::as_bytes(std::span(word));
    for (int peer = 0; peer < size(); ++peer) connected->send(peer, Sockets::Kind::word, bytes);
    return connected->drain(std::chrono::milliseconds(static_cast<int>(1e3 * seconds)));
  }

  /// Tells all peers that this rank is here, and waits itself.
  void say_waiting() {
    const auto connected = sockets();
    for (int peer = 0; connected && peer < size(); ++peer) {
      connected->send(peer, Sockets::Kind::waits, {});
    }
  }

  /// What happens to this rank in place of a message; for tests.
  struct Fault {
    std::uint64_t left = 0;      // messages before it
    std::optional<Phase> phase;  // of those alone
    int signal = 0;              // that it gets; none: a CommError
    std::string words;
  };
  void fail_at(Fault fault) { fault_ = std::move(fault); }

  void post(int peer, const Tag& tag, std::span<const std::byte> head,
            std::span<const std::byte> bytes) override {
    if (fault_ && topreduce::comm::phase_of(mailbox().place(), tag) ==
                      fault_->phase.value_or(topreduce::comm::phase_of(mailbox().place(), tag))) {
      if (fault_->left-- == 0) strike();
    }
    Communicator::post(peer, tag, head, bytes);
  }

  void wake() {
    if (const auto connected = sockets()) connected->wake();
  }

  /// Also while another communicator waits.
  void look() { receive_frames(); }

  void part_of_others() { part_ = true; }

  void drain() override {
    if (const auto connected = sockets()) {
      constexpr std::chrono::seconds kMost(1);  // a peer that takes nothing is found elsewhere
      for (const Backoff backoff(spin()); connected->queued() && backoff.waited() < kMost;) {
        pause(backoff);
        receive_frames();
      }
    }
    if (!drains_) return;
    const nb::gil_scoped_acquire gil;
    call("drain");
  }

 protected:
  void send_frame(int peer, std::span<const std::byte> frame) override {
    if (const auto connected = sockets()) {
      return connected->send(peer, Sockets::Kind::frame, frame);
    }
    const nb::gil_scoped_acquire gil;
    call("send_frame", peer, view(frame));
  }

  bool receive_frames() override {
    if (const auto connected = sockets()) {
      connected->move(receiver_);
      return true;
    }
    if (!asked_) {
      const nb::gil_scoped_acquire gil;
      polls_ = implements("receive_frames");
      drains_ = implements("drain");
      asked_ = true;
    }
    if (polls_) {
      const nb::gil_scoped_acquire gil;
      call("receive_frames");
    }
    return polls_;
  }

  void pause(const Backoff& backoff) override {
    constexpr std::chrono::milliseconds kMost(50);
    if (const auto connected = sockets()) {
      connected->wait(kMost);
      return;
    }
    backoff.pause();
  }

  std::size_t frame_limit() const override { return frame_limit_; }

  void do_native_all_reduce(std::span<float> values) override {
    const nb::gil_scoped_acquire gil;
    call("native_all_reduce",
         nb::cast(FloatArray(values.data(), {values.size()}), nb::rv_policy::reference));
  }

  // Long waits are rare, so this may cost a little: it lets Ctrl-C through. Time in which this
  // process stood still does not count.
  void still_waiting(Backoff::Clock::duration waited) override {
    constexpr std::chrono::milliseconds kBetween(100), kMost(1000);
    if (waited < waited_) waited_ = counted_ = {};  // another wait
    if (waited < waited_ + kBetween) return;
    counted_ += std::min<Backoff::Clock::duration>(waited - waited_, kMost);
    waited_ = waited;
    const nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    call("still_waiting", std::chrono::duration<double>(counted_).count());
  }

  void misplaced(const std::string& text) const override {
    if (part_) throw WireError(text);
    Communicator::misplaced(text);
  }

 private:
  // What was posted before leaves as ever.
  void strike() {
    flush();
    const Fault fault = *std::exchange(fault_, {});
    if (fault.signal == 0) throw CommError(fault.words);
    std::raise(fault.signal);
  }
  void came(int peer, Sockets::Kind kind, Bytes& frame) {
    if (kind == Sockets::Kind::frame) return mailbox().accept(peer, frame);
    const nb::gil_scoped_acquire gil;
    if (kind == Sockets::Kind::waits) return call("waits", peer);
    const auto* word = reinterpret_cast<const char*>(frame.data());
    call("heard", peer, nb::bytes(word, frame.size()));
  }
  void lost(int peer, const std::string& why) {
    const nb::gil_scoped_acquire gil;
    call("lost", peer, why);
  }

  nb::object self() const { return nb::find(static_cast<const Communicator&>(*this)); }
  bool implements(const char* name) const {
    return !nb::getattr(self().type(), name).is(nb::getattr(nb::type<Communicator>(), name));
  }
  template <class... Arguments>
  void call(const char* name, Arguments&&... arguments) {
    nb::getattr(self(), name)(std::forward<Arguments>(arguments)...);
  }

  std::size_t frame_limit_;
  bool part_ = false;
  bool asked_ = false, polls_ = false, drains_ = false;  // what the subclass implements
  Backoff::Clock::duration waited_{}, counted_{};        // of the wait
  std::optional<Fault> fault_;
  const Sockets::Receiver receiver_{
      [this](int peer, Sockets::Kind kind, Bytes& frame) { came(peer, kind, frame); },
      [this](int peer, const std::string& why) { lost(peer, why); }};
  mutable std::mutex mutex_;
  std::shared_ptr<Sockets> sockets_;
};

PythonCommunicator& written_in_python(Communicator& self) {
  if (auto* own = dynamic_cast<PythonCommunicator*>(&self)) return *own;
  throw std::invalid_argument("communicator: only a transport written in Python has this");
}

// ---- ranks as threads ---------------------------------------------------------------------------

// A rank of run_ranks as Python sees it. Python may keep it, so it outlives the rank it stands for.
class LentRank final : public Decorator {
 public:
  explicit LentRank(Communicator& lender) : Decorator(lender) {}
  void give_back() { over_ = true; }

  void drain() override {
    check();
    Decorator::drain();
  }

 protected:
  void send_frame(int peer, std::span<const std::byte> frame) override {
    check();
    Decorator::send_frame(peer, frame);
  }
  bool receive_frames() override {
    check();
    return Decorator::receive_frames();
  }
  std::size_t frame_limit() const override {
    check();
    return Decorator::frame_limit();
  }

 private:
  void check() const {
    if (over_) throw CommError("rank " + std::to_string(rank()) + ": its run_ranks is over");
  }

  std::atomic<bool> over_ = false;
};

nb::list run_ranks(int ranks, const nb::callable& body) {
  std::vector<nb::object> results(static_cast<std::size_t>(std::max(0, ranks)));
  {
    const nb::gil_scoped_release release;
    topreduce::comm::run_ranks(ranks, [&](Communicator& comm) {
      const nb::gil_scoped_acquire gil;
      auto* lent = new LentRank(comm);
      const nb::object rank =
          nb::cast(static_cast<Communicator*>(lent), nb::rv_policy::take_ownership);
      const struct Return {
        ~Return() { lent->give_back(); }
        LentRank* lent;
      } at_the_end{lent};
      results[at(comm.rank())] = body(rank);
    });
  }
  nb::list list;
  for (nb::object& result : results) list.append(result.is_valid() ? result : nb::none());
  return list;
}

// ---- what Python calls --------------------------------------------------------------------------

std::span<const std::byte> bytes_of(const ReadableBytes& array) {
  return {reinterpret_cast<const std::byte*>(array.data()), array.size()};
}

nb::tuple to_python(Inbox&& inbox) {
  auto* kept = new Inbox(std::move(inbox));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<Inbox*>(p); });
  auto* data = reinterpret_cast<std::uint8_t*>(kept->bytes.data());
  return nb::make_tuple(ByteArray(data, {kept->bytes.size()}, owner), kept->counts);
}

nb::tuple all_to_all(Communicator& self, ReadableBytes send,
                     const std::vector<std::size_t>& counts) {
  Inbox inbox;
  {
    const nb::gil_scoped_release release;
    self.all_to_all(bytes_of(send), counts, inbox);
  }
  return to_python(std::move(inbox));
}

nb::tuple all_gather(Communicator& self, ReadableBytes mine) {
  Inbox inbox;
  {
    const nb::gil_scoped_release release;
    self.all_gather(bytes_of(mine), inbox);
  }
  return to_python(std::move(inbox));
}

void broadcast(Communicator& self, ByteArray bytes, int root) {
  const nb::gil_scoped_release release;
  self.broadcast({reinterpret_cast<std::byte*>(bytes.data()), bytes.size()}, root);
}

void enter(Communicator& self, std::string_view call, std::uint64_t step) {
  using Kind = Place::Kind;
  constexpr std::array<std::pair<std::string_view, Kind>, 7> kCalls = {
      {{"attach", Kind::attach},
       {"agree", Kind::agree},
       {"configure", Kind::configure},
       {"bypass", Kind::bypass},
       {"compress", Kind::compress},
       {"load", Kind::load},
       {"step", Kind::step}}};
  for (const auto& [name, kind] : kCalls) {
    if (name == call) return self.enter({kind, step});
  }
  throw std::invalid_argument("enter: there is no call '" + std::string(call) + "'");
}

int peer_of(const Communicator& self, int peer) {
  if (peer >= 0 && peer < self.size() && peer != self.rank()) return peer;
  throw std::invalid_argument("communicator: rank " + std::to_string(peer) +
                              " is no peer of rank " + std::to_string(self.rank()) + " of " +
                              std::to_string(self.size()));
}

void accept(Communicator& self, int peer, ReadableBytes frame) {
  peer_of(self, peer);
  const nb::gil_scoped_release release;
  self.mailbox().accept(peer, bytes_of(frame));
}

void lose(Communicator& self, int peer, const std::string& why, std::string_view how) {
  const Loss loss = how == "damaged" ? Loss::damaged : Loss::gone;
  self.mailbox().lose(peer_of(self, peer), loss, why);
}

void set_names(Communicator& self, std::string title, std::vector<int> names, bool all_hear) {
  if (names.size() != at(self.size())) {
    throw std::invalid_argument("set_names: " + std::to_string(names.size()) + " names for " +
                                std::to_string(self.size()) + " ranks");
  }
  if (!all_hear) written_in_python(self).part_of_others();
  self.mailbox().set_names(std::move(title), std::move(names));
}

void fail_at(Communicator& self, std::uint64_t messages, std::string words, std::string_view phase,
             std::string_view how) {
  PythonCommunicator::Fault fault{messages, {}, 0, std::move(words)};
  constexpr std::array<std::string_view, 3> kPhases = {"agreement", "exchange", "vote"};
  const auto found = std::ranges::find(kPhases, phase);
  if (found != kPhases.end()) fault.phase = static_cast<Phase>(found - kPhases.begin());
  if (how != "raise") fault.signal = how == "kill" ? SIGKILL : SIGSTOP;
  written_in_python(self).fail_at(std::move(fault));
}

std::shared_ptr<Sockets> sockets_of(Communicator& comm) {
  const auto* own = dynamic_cast<PythonCommunicator*>(&comm);
  return own == nullptr ? nullptr : own->sockets();
}

// Without sockets nobody wakes.
bool doze(std::chrono::nanoseconds most) {
  constexpr std::chrono::nanoseconds kBetweenLooks = std::chrono::milliseconds(2);
  std::this_thread::sleep_for(std::min(most, kBetweenLooks));
  return false;
}

}  // namespace

bool wait_for_wake(Communicator& comm, std::chrono::nanoseconds most) {
  const auto connected = sockets_of(comm);
  return connected ? connected->wait_for_wake(most) : doze(most);
}

bool wait_for_news(Communicator& comm, std::chrono::milliseconds most) {
  const auto connected = sockets_of(comm);
  return connected ? connected->wait(most) : doze(most);
}

#define BYTES "numpy.typing.NDArray[numpy.uint8]"

void bind_comm(nb::module_& module) {
  nb::class_<Communicator, PythonCommunicator>(
      module, "Communicator",
      "Moves bytes between ranks. To bring another transport, subclass it and implement\n"
      "send_frame; and either receive_frames, or pass frames on by `accept` from a thread of "
      "yours.")
      .def(nb::init<int, int, std::size_t>(), "rank"_a, "size"_a,
           "frame_limit"_a = std::size_t{1} << 30)
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def("enter", &enter, "call"_a, "step"_a = 0,
           "Start another part of the program: 'attach', 'agree', 'configure', 'bypass', "
           "'compress', "
           "'load' or\n'step'. Ranks that are at different places get ValueError, all of them.")
      .def_prop_ro("in_step", &Communicator::in_step,
                   "Whether no peer waits for more of what was entered last.")
      .def("all_to_all", &all_to_all, "send"_a.noconvert(), "counts"_a,
           nb::sig("def all_to_all(self, send: " BYTES
                   ", counts: collections.abc.Sequence[int]) -> tuple[" BYTES ", list[int]]"),
           "Send counts[r] bytes of `send` to each rank r, one stretch after the other.")
      .def("all_gather", &all_gather, "mine"_a.noconvert(),
           nb::sig("def all_gather(self, mine: " BYTES ") -> tuple[" BYTES ", list[int]]"),
           "Send `mine` to every rank.")
      .def("broadcast", &broadcast, "bytes"_a.noconvert(), "root"_a = 0,
           nb::sig("def broadcast(self, bytes: " BYTES ", root: int = 0) -> None"),
           "Replace `bytes`, of one length on all ranks, with those of `root`.")
      .def("barrier", &Communicator::barrier, nb::call_guard<nb::gil_scoped_release>(),
           "Return once every rank has called it.")
      .def("trim", &Communicator::trim, "Free memory that long messages have left.")
      .def_prop_ro("bytes_sent", [](const Communicator& self) { return self.traffic().bytes_sent; })
      .def_prop_ro("bytes_received",
                   [](const Communicator& self) { return self.traffic().bytes_received; })
      .def_prop_ro("messages", [](const Communicator& self) { return self.traffic().messages; })
      .def_prop_ro("rounds", [](const Communicator& self) { return self.traffic().rounds; })

      // What a transport implements.
      .def(
          "send_frame",
          [](Communicator&, int, const nb::object&) {
            throw std::invalid_argument("communicator: the subclass must implement send_frame");
          },
          "peer"_a, "frame"_a, nb::sig("def send_frame(self, peer: int, frame: " BYTES ") -> None"),
          "Start to send at most `frame_limit` bytes, which may change once this returns. Waits "
          "for\n"
          "nobody; frames of one peer to another keep their order.")
      .def(
          "receive_frames", [](Communicator&) {},
          "Pass on what has come, without waiting: `accept` each frame.")
      .def(
          "heard", [](Communicator&, int, const nb::bytes&) {}, "peer"_a, "word"_a,
          nb::sig("def heard(self, peer: int, word: bytes) -> None"),
          "Called with a peer's last word, if it came by a socket.")
      .def(
          "waits", [](Communicator&, int) {}, "peer"_a,
          nb::sig("def waits(self, peer: int) -> None"),
          "Called if a peer said so by `say_waiting`.")
      .def(
          "lost", [](Communicator&, int, const nb::str&) {}, "peer"_a, "why"_a,
          nb::sig("def lost(self, peer: int, why: str) -> None"),
          "Called when a socket is closed by the other side, or broken.")
      .def(
          "still_waiting", [](Communicator&, double) {}, "seconds"_a,
          "Called ten times a second while a wait lasts; may raise to end it.")
      .def(
          "drain", [](Communicator&) {},
          "Wait until what was sent has left, where bytes move only in calls of the transport.")

      .def(
          "native_all_reduce", [](Communicator&, const nb::object&) {}, "values"_a,
          nb::sig(
              "def native_all_reduce(self, values: numpy.typing.NDArray[numpy.float32]) -> None"),
          "Replace `values` with their sum over the ranks, in any order; for reduce=native.")

      // What a transport calls.
      .def("accept", &accept, "peer"_a, "frame"_a.noconvert(),
           nb::sig("def accept(self, peer: int, frame: " BYTES ") -> None"),
           "Take in a frame; from any thread, in the order of the peer's.")
      .def("lose", &lose, "peer"_a, "why"_a, "how"_a = "gone",
           nb::sig("def lose(self, peer: int, why: str, how: typing.Literal['gone', 'damaged'] = "
                   "'gone') -> None"),
           "Nothing more will come from `peer`, which `why`: 'has left'. If its bytes cannot be "
           "used,\nit 'sent' `why`.")
      .def(
          "awaited", [](Communicator& self) { return self.mailbox().awaited(); },
          "The peers that this rank waits for right now, unless they are lost.")
      .def("set_names", &set_names, "title"_a, "names"_a, "all_hear"_a = true,
           "How errors call this rank, and the numbers of all ranks in them. Unless `all_hear`, "
           "ranks\nat different places get WireError: others of the program are not told.")
      .def(
          "connect",
          [](Communicator& self, std::vector<int> sockets) {
            written_in_python(self).connect(std::move(sockets));
          },
          "sockets"_a,
          "Take over connected sockets, by rank (-1: none), and send and receive frames by them, "
          "in\n"
          "place of send_frame and receive_frames.")
      .def(
          "disconnect", [](Communicator& self) { written_in_python(self).disconnect(); },
          "Close the sockets.")
      .def(
          "say",
          [](Communicator& self, std::string_view word, double seconds) {
            const nb::gil_scoped_release release;
            return written_in_python(self).say(word, seconds);
          },
          "word"_a, "seconds"_a,
          "Send a last word by the sockets, and wait until it has arrived. Returns the peers that "
          "may "
          "miss it.")
      .def(
          "look", [](Communicator& self) { written_in_python(self).look(); },
          "Take in what has come, without waiting: frames, last words, and who is lost.")
      .def(
          "say_waiting", [](Communicator& self) { written_in_python(self).say_waiting(); },
          "Tell all peers by the sockets that this rank is here, and waits itself.")
      .def("fail_at", &fail_at, "messages"_a, "words"_a, "phase"_a = "any", "how"_a = "raise",
           nb::sig("def fail_at(self, messages: int, words: str, phase: typing.Literal['any', "
                   "'agreement', 'exchange', 'vote'] = 'any', how: typing.Literal['raise', 'kill', "
                   "'stop'] = 'raise') -> None"),
           "After so many more messages, those of the phase, sending is a CommError that says "
           "`words`;\nor the process is killed or stopped. For tests.")
      .def(
          "set_timeout",
          [](Communicator& self, double seconds) {
            self.set_timeout(std::chrono::milliseconds(static_cast<std::int64_t>(1e3 * seconds)));
          },
          "seconds"_a,
          "How long to wait for a peer of whom nothing comes: CommError then. For ever, unless "
          "set.")
      .def(
          "whereabouts", [](Communicator& self) { return self.mailbox().whereabouts(); },
          "Where this rank is and what it waits for, in words: 'step 4, the vote'.")
      .def(
          "wake", [](Communicator& self) { written_in_python(self).wake(); },
          "End an `attend` of another thread, or the next one.");
  module.attr("T") = nb::type_var("T");
  module.def("run_ranks", &run_ranks, "ranks"_a, "body"_a,
             nb::sig("def run_ranks(ranks: int, body: collections.abc.Callable[[Communicator], T]) "
                     "-> list[T]"),
             "Run body(comm) once per rank, each in a thread of this process; return its results.");
}
