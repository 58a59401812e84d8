"""Ranks of an MPI job, through mpi4py: `pip install 'topreduce[mpi]'`.

comm = topreduce.mpi.Communicator()      # all of MPI.COMM_WORLD
reducer.begin(comm)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import topreduce

__all__ = ["Communicator"]

_Bytes = NDArray[np.uint8]


class Communicator(topreduce.Communicator):
    """A duplicate of `comm`, so that its messages never meet the program's own.

    An error of MPI becomes CommError. A program that gives up must call MPI.COMM_WORLD.Abort(),
    since MPI knows no time-out; `python -m mpi4py` does that for uncaught exceptions.
    """

    def __init__(self, comm: MPI.Intracomm = MPI.COMM_WORLD) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._comm = comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)

    def all_to_all(self, send: _Bytes, counts: Sequence[int]) -> tuple[_Bytes, list[int]]:
        try:
            incoming = self._comm.alltoall(list(counts))
            received = np.empty(sum(incoming), np.uint8)
            self._comm.Alltoallv([send, counts, MPI.BYTE], [received, incoming, MPI.BYTE])
        except MPI.Exception as error:
            raise topreduce.CommError(f"all_to_all on rank {self.rank}: {error}") from error
        return received, incoming

    def all_gather(self, mine: _Bytes) -> tuple[_Bytes, list[int]]:
        try:
            counts = self._comm.allgather(mine.size)
            received = np.empty(sum(counts), np.uint8)
            self._comm.Allgatherv([mine, MPI.BYTE], [received, counts, MPI.BYTE])
        except MPI.Exception as error:
            raise topreduce.CommError(f"all_gather on rank {self.rank}: {error}") from error
        return received, counts
