#pragma once

#if __cplusplus < 202002L
#error "topreduce needs C++20: -std=c++20"
#endif

// Everything a program needs. Linked with topreduce::mpi it gets comm::Mpi too: that target defines
// TOPREDUCE_WITH_MPI.

#ifdef TOPREDUCE_WITH_MPI
#include "topreduce/comm/mpi.h"
#endif
#include "topreduce/comm/self.h"
#include "topreduce/comm/thread.h"
#include "topreduce/methods.h"
#include "topreduce/reducer.h"
#include "topreduce/version.h"
