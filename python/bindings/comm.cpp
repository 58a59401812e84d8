#include <cstring>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>
#include <nanobind/typing.h>

#include "bindings.h"
#include "topreduce/comm/communicator.h"
#include "topreduce/comm/thread.h"

namespace nb = nanobind;
using namespace nb::literals;
using topreduce::CommError;
using topreduce::comm::Communicator;
using topreduce::comm::Inbox;

namespace {

using ByteArray = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ReadableBytes =
    nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A view that lives as long as the call it is handed to.
nb::object view(std::span<const std::byte> bytes) {
  auto* data = const_cast<std::byte*>(bytes.data());
  return nb::cast(ByteArray(data, {bytes.size()}), nb::rv_policy::reference);
}

// A transport written in Python: it subclasses Communicator and implements all_to_all and
// all_gather. They are called with the GIL, from whichever thread runs the step.
class PythonCommunicator : public Communicator {
 public:
  PythonCommunicator(int rank, int size) : rank_(rank), size_(size) {
    if (size < 1 || rank < 0 || rank >= size) {
      throw std::invalid_argument("communicator: rank " + std::to_string(rank) + " of " +
                                  std::to_string(size) + " does not exist");
    }
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

 protected:
  void do_all_to_all(std::span<const std::byte> send, std::span<const std::size_t> counts,
                     Inbox& inbox) override {
    const nb::gil_scoped_acquire gil;
    nb::list lengths;
    for (const std::size_t count : counts) lengths.append(count);
    take(implementation("all_to_all")(view(send), lengths), inbox);
  }
  void do_all_gather(std::span<const std::byte> mine, Inbox& inbox) override {
    const nb::gil_scoped_acquire gil;
    take(implementation("all_gather")(view(mine)), inbox);
  }

 private:
  // The subclass's own method; the one of Communicator would call us again.
  nb::object implementation(const char* name) const {
    const nb::object self = nb::find(static_cast<const Communicator&>(*this));
    if (nb::getattr(self.type(), name).is(nb::getattr(nb::type<Communicator>(), name))) {
      throw std::invalid_argument(std::string("communicator: the subclass must implement ") + name);
    }
    return nb::getattr(self, name);
  }

  static void take(const nb::object& result, Inbox& inbox) {
    ReadableBytes bytes;
    if (!nb::isinstance<nb::tuple>(result) || nb::len(result) != 2 ||
        !nb::try_cast(result[0], bytes, false) || !nb::try_cast(result[1], inbox.counts)) {
      throw CommError("a communicator must return (uint8 array of all bytes, list of counts)");
    }
    inbox.bytes.resize(bytes.size());
    if (bytes.size() > 0) std::memcpy(inbox.bytes.data(), bytes.data(), bytes.size());
  }

  int rank_, size_;
};

// A rank of run_ranks as Python sees it. Python may keep it, so it outlives the rank it stands for.
class LentRank final : public Communicator {
 public:
  explicit LentRank(Communicator& lender)
      : rank_(lender.rank()), size_(lender.size()), lender_(&lender) {}
  void give_back() { lender_ = nullptr; }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

 protected:
  void do_all_to_all(std::span<const std::byte> send, std::span<const std::size_t> counts,
                     Inbox& inbox) override {
    lender().all_to_all(send, counts, inbox);
  }
  void do_all_gather(std::span<const std::byte> mine, Inbox& inbox) override {
    lender().all_gather(mine, inbox);
  }
  void do_broadcast(std::span<std::byte> bytes, int root) override {
    lender().broadcast(bytes, root);
  }
  void do_barrier() override { lender().barrier(); }

 private:
  Communicator& lender() const {
    if (lender_ != nullptr) return *lender_;
    throw CommError("rank " + std::to_string(rank_) + ": its run_ranks is over");
  }

  int rank_, size_;
  Communicator* lender_;
};

nb::tuple to_python(const Inbox& inbox) {
  auto* copy = new std::vector<std::byte>(inbox.bytes.begin(), inbox.bytes.end());
  nb::capsule owner(copy, [](void* p) noexcept { delete static_cast<std::vector<std::byte>*>(p); });
  return nb::make_tuple(ByteArray(copy->data(), {copy->size()}, owner), inbox.counts);
}

std::span<const std::byte> bytes_of(const ReadableBytes& array) {
  return {reinterpret_cast<const std::byte*>(array.data()), array.size()};
}

nb::tuple all_to_all(Communicator& self, ReadableBytes send,
                     const std::vector<std::size_t>& counts) {
  Inbox inbox;
  {
    const nb::gil_scoped_release release;
    self.all_to_all(bytes_of(send), counts, inbox);
  }
  return to_python(inbox);
}

nb::tuple all_gather(Communicator& self, ReadableBytes mine) {
  Inbox inbox;
  {
    const nb::gil_scoped_release release;
    self.all_gather(bytes_of(mine), inbox);
  }
  return to_python(inbox);
}

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
      results[static_cast<std::size_t>(comm.rank())] = body(rank);
    });
  }
  nb::list list;
  for (nb::object& result : results) list.append(result.is_valid() ? result : nb::none());
  return list;
}

}  // namespace

void bind_comm(nb::module_& module) {
  nb::class_<Communicator, PythonCommunicator>(
      module, "Communicator",
      "Moves bytes between ranks. Subclass it to bring another transport: implement all_to_all "
      "and\n"
      "all_gather; each returns the received bytes in rank order and how many came from each rank.")
      .def(nb::init<int, int>(), "rank"_a, "size"_a)
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def("all_to_all", &all_to_all, "send"_a.noconvert(), "counts"_a,
           nb::sig("def all_to_all(self, send: numpy.typing.NDArray[numpy.uint8], counts: "
                   "collections.abc.Sequence[int]) -> "
                   "tuple[numpy.typing.NDArray[numpy.uint8], list[int]]"),
           "Send counts[r] bytes of `send` to each rank r, one stretch after the other.")
      .def("all_gather", &all_gather, "mine"_a.noconvert(),
           nb::sig("def all_gather(self, mine: numpy.typing.NDArray[numpy.uint8]) -> "
                   "tuple[numpy.typing.NDArray[numpy.uint8], list[int]]"),
           "Send `mine` to every rank.")
      .def("barrier", &Communicator::barrier, nb::call_guard<nb::gil_scoped_release>(),
           "Return once every rank has called it.")
      .def_prop_ro("bytes_sent", [](const Communicator& self) { return self.traffic().bytes_sent; })
      .def_prop_ro("bytes_received",
                   [](const Communicator& self) { return self.traffic().bytes_received; })
      .def_prop_ro("rounds", [](const Communicator& self) { return self.traffic().rounds; });
  module.attr("T") = nb::type_var("T");
  module.def("run_ranks", &run_ranks, "ranks"_a, "body"_a,
             nb::sig("def run_ranks(ranks: int, body: collections.abc.Callable[[Communicator], T]) "
                     "-> list[T]"),
             "Run body(comm) once per rank, each in a thread of this process; return its results.");
}
