# What a program may use: these headers are installed, tests/consumer compiles each by itself, and
# the site documents them.
set(public_headers
    topreduce.h api.h participation.h errors.h layout.h methods.h rebuild.h reducer.h spec.h
    state.h stats.h storage.h version.h comm/communicator.h comm/decorator.h comm/mailbox.h
    comm/self.h comm/thread.h)
set(public_mpi_headers comm/mpi.h)
