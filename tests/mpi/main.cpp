// Every process runs the same tests in the same order; a test is one collective program. Rank 0
// prints, and the others only what fails on them.

#include <csignal>
#include <cstdio>
#include <string>
#include <string_view>

#include <gtest/gtest.h>

#include "tests/mpi/faults.h"
#include "tests/mpi/processes.h"
#include "tests/tiers.h"
#include "topreduce/comm/mpi.h"

namespace {

// What the launcher must notice: the job then ends, with an error, though ranks still wait.
void lose_a_rank(std::string_view way) {
  topreduce::comm::Mpi comm;
  comm.barrier();
  if (comm.rank() == 1) {
    if (way == "--one-rank-killed") std::raise(SIGKILL);
    throw topreduce::CommError("thrown by a test");
  }
  comm.barrier();
}

}  // namespace

int main(int argc, char** argv) {
  int provided = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  testing::InitGoogleTest(&argc, argv);
  int rank = 0, ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (argc > 2) topreduce::laws::lose_a_rank_in_a_step(argv[2]);
  if (argc > 1) {
    lose_a_rank(argv[1]);
    return 0;  // nobody noticed
  }
  if (GTEST_FLAG_GET(filter) == "*") {
    // On many ranks threads check the laws, unless tests may take long.
    const bool few = ranks <= 5 || topreduce::kLong;
    const std::string laws = few ? ":*/Laws.*_on_" + std::to_string(ranks) : "";
    GTEST_FLAG_SET(filter, "Mpi*:*/Mpi*" + laws);
  }
  if (rank != 0) {
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new topreduce::laws::OnlyFailures(rank));
  }
  topreduce::laws::meet = topreduce::laws::meet_as_processes;
  int failed = RUN_ALL_TESTS();
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return failed;
}
