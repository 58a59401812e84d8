// Four ranks, here threads of one process, average their gradients by their largest tenth.
#include <cstdio>
#include <topreduce/topreduce.h>
#include <vector>

int main() {
  topreduce::run_ranks(4, [](topreduce::Communicator& comm) {
    topreduce::Reducer reducer(topreduce::Layout({{"weight", {10, 10}}}),
                               "topk:density=0.1,values=fp32");  // what arrives is not rounded
    // A training begins with dense steps: ",warmup_steps=10,ramp_steps=100".
    std::vector<float> gradient(100, 0.01f);
    gradient[static_cast<std::size_t>(10 * comm.rank())] = 4;
    reducer.average(comm, gradient);
    if (comm.rank() == 0) std::printf("mean of entry 10: %g\n", static_cast<double>(gradient[10]));
  });
}
