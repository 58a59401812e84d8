// The transport over MPI: the suite that every transport passes, pieces and throttle, and errors.

#include "topreduce/comm/mpi.h"

#include <cstring>

#include <gtest/gtest.h>

#include "tests/comm_suite.h"
#include "topreduce/reducer.h"

namespace {
int calls_until_failure = -1;  // negative: none will fail
}

// MPI lets a program put itself before any of its functions: here is where errors come from.
extern "C" int MPI_Irecv(void* buffer, int count, MPI_Datatype type, int source, int tag,
                         MPI_Comm comm, MPI_Request* request) {
  if (calls_until_failure == 0) return MPI_ERR_OTHER;
  if (calls_until_failure > 0) --calls_until_failure;
  return PMPI_Irecv(buffer, count, type, source, tag, comm, request);
}

namespace topreduce::comm {
namespace {

class MpiSuite : public testing::TestWithParam<suite::Check> {};

TEST_P(MpiSuite, Passes) {
  Mpi comm;
  GetParam().run(comm);
}

TEST_P(MpiSuite, PassesInPiecesWithOnePartnerAtOnce) {
  Mpi comm(MPI_COMM_WORLD, {.piece = 1000, .partners = 1});
  GetParam().run(comm);
}

INSTANTIATE_TEST_SUITE_P(Comm, MpiSuite, testing::ValuesIn(suite::kChecks),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(Mpi, PiecesOfAnySizeArriveInOrder) {
  for (const std::size_t piece : {1u, 3u, 7u, 64u}) {
    for (const int partners : {1, 2, 100}) {
      Mpi comm(MPI_COMM_WORLD, {piece, partners});
      Inbox inbox;
      suite::exchange_parts(comm, inbox, [](int from, int to) {
        return static_cast<std::size_t>((from * 5 + to * 3) % 7 * 21);
      });
    }
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
  EXPECT_THROW(Mpi(MPI_COMM_WORLD, {.piece = 0}), std::invalid_argument);
  EXPECT_THROW(Mpi(MPI_COMM_WORLD, {.piece = std::size_t{1} << 31}), std::invalid_argument);
  EXPECT_THROW(Mpi(MPI_COMM_WORLD, {.partners = 0}), std::invalid_argument);
}

// Not among those that run by themselves: it takes 5 GB of memory.
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

// ---- errors ------------------------------------------------------------------------------------

/// Makes MPI fail on every rank alike, after some calls that go well.
class Failing {
 public:
  explicit Failing(int good_calls) { calls_until_failure = good_calls; }
  ~Failing() { calls_until_failure = -1; }
};

TEST(MpiErrors, BecomeCommErrorsAndStay) {
  Mpi first;
  if (first.size() == 1) return;  // nothing to receive
  const int others = first.size() - 1;
  for (const int good_calls : {0, others}) {  // while lengths come, while parts come
    Mpi comm;
    Inbox inbox;
    try {
      const Failing failing(good_calls);
      comm.all_gather(std::vector<std::byte>(8), inbox);
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      const std::string text = error.what(), me = "rank " + std::to_string(comm.rank());
      EXPECT_NE(text.find("all_gather on " + me + ", with rank "), std::string::npos) << text;
    }
    EXPECT_THROW(comm.all_gather({}, inbox), CommError);
    EXPECT_THROW(comm.barrier(), CommError);
    first.barrier();  // other communicators go on
  }
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
    const Failing failing(0);
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
