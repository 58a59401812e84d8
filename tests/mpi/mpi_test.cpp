// The transport over MPI: the suite that every transport passes, pieces, leaving, and errors.

#include "topreduce/comm/mpi.h"

#include <cstring>
#include <thread>

#include <gtest/gtest.h>

#include "tests/comm_suite.h"
#include "topreduce/reducer.h"

namespace {

struct {
  int sends = -1, receives = -1;  // that go well before one fails; negative: none will fail
} good_calls;

bool fails(int& calls) {
  if (calls > 0) --calls;
  return calls == 0;
}

}  // namespace

// MPI lets a program put itself before any of its functions: here is where errors come from.
extern "C" int MPI_Isend(const void* buffer, int count, MPI_Datatype type, int to, int tag,
                         MPI_Comm comm, MPI_Request* request) {
  if (fails(good_calls.sends)) return MPI_ERR_OTHER;
  return PMPI_Isend(buffer, count, type, to, tag, comm, request);
}
extern "C" int MPI_Imrecv(void* buffer, int count, MPI_Datatype type, MPI_Message* message,
                          MPI_Request* request) {
  if (fails(good_calls.receives)) return MPI_ERR_OTHER;
  return PMPI_Imrecv(buffer, count, type, message, request);
}

namespace topreduce::comm {
namespace {

class MpiSuite : public testing::TestWithParam<suite::Check> {};

TEST_P(MpiSuite, Passes) {
  Mpi comm;
  GetParam().run(comm);
}

TEST_P(MpiSuite, PassesInPieces) {
  Mpi comm(MPI_COMM_WORLD, {.piece = 1000, .spin = std::chrono::microseconds(0)});
  GetParam().run(comm);
}

INSTANTIATE_TEST_SUITE_P(Comm, MpiSuite, testing::ValuesIn(suite::kChecks),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(Mpi, PiecesOfAnySizeArriveInOrder) {
  for (const std::size_t piece : {19u, 20u, 23u, 64u, 100'000u}) {
    Mpi comm(MPI_COMM_WORLD, {piece});
    Inbox inbox;
    suite::exchange_parts(comm, inbox, [](int from, int to) {
      return static_cast<std::size_t>((from * 5 + to * 3) % 7 * 21);
    });
    if (piece < 1000) continue;  // as short and long messages of MPI, one after the other
    for (const std::size_t length : {300'000u, 5u, 1'000'001u}) {
      suite::exchange_parts(comm, inbox, [length](int, int) { return length; });
    }
  }
}

// More than may be under way at once, while nobody receives yet.
TEST(Mpi, EveryoneMaySendMuchBeforeItReceives) {
  Mpi comm(MPI_COMM_WORLD, {.piece = 1 << 20});
  if (comm.size() == 1) return;
  const int to = (comm.rank() + 1) % comm.size();
  const int from = (comm.rank() + comm.size() - 1) % comm.size();
  const auto bytes = suite::pattern(comm.rank(), to, 10'000'000);
  for (std::uint32_t round = 0; round < 8; ++round) {
    comm.post(to, {0, round}, {}, bytes);
    comm.flush();
  }
  for (std::uint32_t round = 8; round-- > 0;) {
    comm.expect({0, round}, from);
    comm.wait({0, round}, 1);
    EXPECT_TRUE(suite::same(comm.message({0, round}, from),
                            suite::pattern(from, comm.rank(), bytes.size())));
    comm.release({0, round});
  }
}

TEST(Mpi, AnotherThreadMayUseIt) {
  int provided = MPI_THREAD_SINGLE;
  MPI_Query_thread(&provided);
  if (provided < MPI_THREAD_SERIALIZED) return;
  Mpi comm;
  for (const auto& check : suite::kChecks) {
    std::jthread([&] { check.run(comm); });
  }
}

TEST(Mpi, WorksOnPartOfAJob) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);
  {
    Mpi comm(half);
    for (const auto& check : suite::kChecks) check.run(comm);
  }
  MPI_Comm_free(&half);
}

// Messages of the program, whatever their tags, do not meet ours.
TEST(Mpi, LeavesTheProgramsMessagesAlone) {
  Mpi comm;
  const int to = (comm.rank() + 1) % comm.size();
  const int from = (comm.rank() + comm.size() - 1) % comm.size();
  int sent = comm.rank(), received = -1;
  MPI_Request requests[2];
  MPI_Irecv(&received, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, requests);
  comm.barrier();
  suite::parts_may_be_uneven_and_empty(comm);
  MPI_Isend(&sent, 1, MPI_INT, to, 2, MPI_COMM_WORLD, requests + 1);
  MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
  EXPECT_EQ(received, from);
}

TEST(Mpi, RefusesLimitsThatCannotWork) {
  EXPECT_THROW(Mpi(MPI_COMM_WORLD, {.piece = 18}), std::invalid_argument);
  EXPECT_THROW(Mpi(MPI_COMM_WORLD, {.piece = std::size_t{1} << 31}), std::invalid_argument);
}

// Not among those that run by themselves: it takes 11 GB of memory.
TEST(LargeMpi, APartOfMoreThan2GBArrivesWhole) {
  Mpi comm;
  ASSERT_GE(comm.size(), 2);
  constexpr std::size_t kWords = (std::size_t{1} << 28) + 12'345;
  const auto word = [](std::size_t i) { return i * 0x9E3779B97F4A7C15 + 1; };
  std::vector<std::uint64_t> part(comm.rank() == 0 ? kWords : 0);
  for (std::size_t i = 0; i < part.size(); ++i) part[i] = word(i);
  std::vector<std::size_t> counts(static_cast<std::size_t>(comm.size()), 0);
  counts[1] = part.size() * sizeof(part[0]);
  Inbox inbox;
  comm.all_to_all(std::as_bytes(std::span(part)), counts, inbox);
  const auto got = inbox.from(0);
  ASSERT_EQ(got.size(), comm.rank() == 1 ? kWords * sizeof(part[0]) : 0);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i * sizeof(part[0]) < got.size(); ++i) {
    std::uint64_t came = 0;
    std::memcpy(&came, got.data() + i * sizeof(came), sizeof(came));
    wrong += came != word(i);
  }
  EXPECT_EQ(wrong, 0u);
}

// ---- leaving -----------------------------------------------------------------------------------

// What is still under way, or was never read, must not come out of a later communicator. On two
// ranks, where one is made quickly, there are more than MPICH has places for: they are given back.
TEST(Mpi, CommunicatorsFollowEachOther) {
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  for (int time = 0; time < (ranks <= 2 ? 2100 : 200); ++time) {
    Mpi comm;
    const Tag tag{0, 0};
    const std::size_t length = time % 100 == 0 ? 200'000 : 8;
    const auto stray = suite::pattern(77, time, length);
    suite::for_others(comm, [&](int peer) { comm.post(peer, {1, 0}, {}, stray); });
    suite::for_others(comm, [&](int peer) {
      comm.expect(tag, peer);
      comm.post(peer, tag, {}, suite::pattern(comm.rank(), time, length));
    });
    comm.wait(tag, at(comm.size() - 1));
    suite::for_others(comm, [&](int peer) {
      EXPECT_TRUE(suite::same(comm.message(tag, peer), suite::pattern(peer, time, length)));
    });
    suite::for_others(comm, [&](int peer) { comm.post(peer, {2, 0}, {}, stray); });
    if ((comm.rank() + time) % 2 == 0) comm.flush();
  }
}

// Those that wait for it are told; those that do not go on.
TEST(Mpi, LeavingReleasesThoseThatWait) {
  for (const int times : {0, 1, 5}) {
    Mpi all;
    auto comm = std::make_unique<Mpi>();
    for (int time = 0; time < times; ++time) comm->barrier();
    if (comm->rank() == 0) {
      comm.reset();
    } else {
      try {
        comm->barrier();
        ADD_FAILURE() << "no error";
      } catch (const CommError& error) {
        EXPECT_NE(std::strstr(error.what(), "rank 0 has left"), nullptr) << error.what();
      }
      EXPECT_THROW(comm->barrier(), CommError);
      comm.reset();
    }
    all.barrier();
  }
}

TEST(Mpi, LeavingAfterTheLastCallHarmsNobody) {
  for (int time = 0; time < 30; ++time) {
    Mpi comm;
    Inbox inbox;
    if (comm.rank() == time % comm.size()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    suite::exchange_parts(comm, inbox, [](int, int) { return std::size_t{1} << 18; });
  }
}

// ---- errors ------------------------------------------------------------------------------------

/// Makes MPI fail on this rank, after some calls that go well.
class Failing {
 public:
  Failing(int sends, int receives) {
    good_calls.sends = sends + 1;
    good_calls.receives = receives + 1;
  }
  ~Failing() { good_calls = {}; }
};
constexpr int kNever = 1 << 30;

TEST(MpiErrors, BecomeCommErrorsAndStay) {
  Mpi first;
  if (first.size() == 1) return;  // nothing to send
  const int last = first.size() - 2;
  for (const auto& [sends, receives] :
       {std::pair{0, kNever}, {last, kNever}, {kNever, 0}, {kNever, last}}) {
    Mpi comm;
    Inbox inbox;
    try {
      const Failing failing(sends, receives);
      comm.all_gather(std::vector<std::byte>(8), inbox);
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      const std::string text = error.what(), me = "rank " + std::to_string(comm.rank());
      EXPECT_TRUE(text.starts_with("MPI on " + me + ", before its first call, with rank ")) << text;
    }
    EXPECT_THROW(comm.all_gather({}, inbox), CommError);
    EXPECT_THROW(comm.barrier(), CommError);
    EXPECT_THROW(comm.poll(), CommError);
    first.barrier();  // other communicators go on
  }
}

// Its connections are gone, but if MPI still takes a message the others need not wait for ever.
TEST(MpiErrors, OfOneRankAreToldToTheOthers) {
  Mpi first;
  if (first.size() == 1) return;
  {
    Mpi comm;
    const Failing failing(comm.rank() == 1 ? 0 : kNever, kNever);
    EXPECT_THROW(comm.barrier(), CommError);
  }
  first.barrier();
}

TEST(MpiErrors, LeaveAReducerAsItWas) {
  Mpi comm;
  if (comm.size() == 1) return;
  Reducer reducer(Layout({{"all", {100}}}), "topk:density=0.1");
  const std::size_t all[] = {0};
  std::vector<float> gradient(100, static_cast<float>(comm.rank() + 1));
  const std::vector<float> before = gradient;
  reducer.agree(comm);
  {
    const Failing failing(0, kNever);
    reducer.begin(comm);
    EXPECT_THROW(reducer.add(all, gradient), CommError);
  }
  EXPECT_EQ(gradient, before);
  EXPECT_EQ(reducer.step(), 0u);

  Mpi anew;
  reducer.begin(anew);
  reducer.add(all, gradient);
  EXPECT_TRUE(reducer.finish().finite);
  EXPECT_EQ(reducer.step(), 1u);
}

}  // namespace
}  // namespace topreduce::comm
