#pragma once

#include <csignal>
#include <cstdio>
#include <string>
#include <string_view>
#include <thread>

#include "tests/cluster.h"
#include "topreduce/comm/decorator.h"
#include "topreduce/comm/mpi.h"

// A process of the job is killed or stopped in a phase of a step; the others must find out.

namespace topreduce::laws {

/// Gets a signal in place of its first message of a phase.
class Doomed final : public comm::Decorator {
 public:
  Doomed(Communicator& inner, comm::Phase phase, int signal)
      : Decorator(inner), phase_(phase), signal_(signal) {}

  void post(int peer, const comm::Tag& tag, std::span<const std::byte> head,
            std::span<const std::byte> bytes) override {
    if (comm::phase_of(mailbox().place(), tag) == phase_) {
      flush();
      std::raise(signal_);
    }
    Decorator::post(peer, tag, head, bytes);
  }

 private:
  comm::Phase phase_;
  int signal_;
};

/// `way`: "kill-vote", "stop-exchange". Never returns: MPI cannot end a job that lost a rank.
[[noreturn]] inline void lose_a_rank_in_a_step(std::string_view way) {
  using namespace std::chrono_literals;
  constexpr auto kTimeout = 500ms;
  auto* const comm = new comm::Mpi(MPI_COMM_WORLD, {.timeout = kTimeout});
  const int signal = way.starts_with("kill") ? SIGKILL : SIGSTOP;
  const auto phase = way.ends_with("agreement")  ? comm::Phase::agreement
                     : way.ends_with("exchange") ? comm::Phase::exchange
                                                 : comm::Phase::vote;
  const Layout layout = small_model();
  Reducer reducer(layout, "topk:density=0.1");
  const auto take_step = [&](Communicator& by, int step) {
    Floats gradient = heavy_tailed(comm->rank(), step, layout);
    reducer.average(by, gradient);
  };
  for (int step = 0; step < 3; ++step) take_step(*comm, step);
  if (phase == comm::Phase::agreement) reducer.set_mode(Reducer::Mode::compress);  // compare anew
  const State before = state_of(reducer);
  const auto start = std::chrono::steady_clock::now();
  std::string told = "no error";
  try {
    if (comm->rank() == 1) {
      Doomed doomed(*comm, phase, signal);
      take_step(doomed, 3);
    } else {
      take_step(*comm, 3);
    }
  } catch (const CommError& error) {
    told = error.what();
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("survivor %d: %s; %s after %.2f s\n", comm->rank(), told.c_str(),
              state_of(reducer) == before ? "nothing changed" : "what is owed changed",
              seconds.count());
  std::fflush(stdout);
  std::this_thread::sleep_for(kTimeout);  // until the others have said so too
  MPI_Abort(MPI_COMM_WORLD, 3);
  std::abort();
}

}  // namespace topreduce::laws
