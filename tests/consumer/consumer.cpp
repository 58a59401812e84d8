#include <cstdio>
#include <mpi.h>
#include <topreduce/topreduce.h>
#include <vector>

// Everyone's gradient is 1 at one place of its own: the mean has all of them.
int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int wrong = 0;
  {
    topreduce::comm::Mpi comm;
    const auto ranks = static_cast<std::size_t>(comm.size());
    topreduce::Reducer reducer(topreduce::Layout({{"weight", {1000}}}),
                               "ok_topk:density=0.01,values=fp32");
    std::vector<float> gradient(1000);
    gradient[static_cast<std::size_t>(comm.rank())] = 1;
    reducer.average(comm, gradient);  // was: MPI_Allreduce, and a division
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      wrong += gradient[i] != (i < ranks ? 1 / static_cast<float>(ranks) : 0);
    }
    try {
      topreduce::Reducer unknown(reducer.layout(), "topq");
      ++wrong;
    } catch (const std::invalid_argument&) {
    }
    wrong += topreduce::methods().empty() || topreduce::stages().empty();
    if (comm.rank() == 0)
      std::printf("topreduce %s, %d ranks\n", topreduce::version(), comm.size());
  }
  MPI_Finalize();
  return wrong == 0 ? 0 : 1;
}
