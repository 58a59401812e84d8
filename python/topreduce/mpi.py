"""Ranks of an MPI job, through mpi4py: `pip install 'topreduce[mpi]'`.

comm = topreduce.mpi.Communicator()      # all of MPI.COMM_WORLD
reducer.begin(comm)
"""

from __future__ import annotations

import time
import weakref

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import topreduce

__all__ = ["Communicator"]

_Bytes = NDArray[np.uint8]
_FOR_LONG = 3.0  # seconds


class Communicator(topreduce.Communicator):
    """A duplicate of `comm`, so that its messages never meet the program's own.

    An error of MPI becomes CommError, and so does a rank of which nothing comes for `timeout`
    seconds. A program that gives up must call MPI.COMM_WORLD.Abort(), since MPI itself knows no
    time-out; `python -m mpi4py` does that for uncaught exceptions.
    """

    def __init__(self, comm: MPI.Intracomm = MPI.COMM_WORLD, timeout: float = 1800.0) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self.set_timeout(timeout)
        self._comm = comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._sends: list[tuple[MPI.Request, _Bytes]] = []
        weakref.finalize(self, _finish, self._sends)

    def send_frame(self, peer: int, frame: _Bytes) -> None:
        kept = frame.copy()
        try:
            self._sends.append((self._comm.Isend([kept, MPI.BYTE], peer), kept))
        except MPI.Exception as error:
            raise topreduce.CommError(f"rank {self.rank}, to rank {peer}: {error}") from error

    def receive_frames(self) -> None:
        status = MPI.Status()
        try:
            self._sends[:] = [each for each in self._sends if not each[0].Test()]
            while (message := self._comm.Improbe(status=status)) is not None:
                frame = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                message.Recv([frame, MPI.BYTE])
                self.accept(status.Get_source(), frame)
        except MPI.Exception as error:
            raise topreduce.CommError(f"rank {self.rank}: {error}") from error

    def drain(self) -> None:
        end = time.monotonic() + _FOR_LONG
        while self._sends and time.monotonic() < end:
            self.receive_frames()


def _finish(sends: list[tuple[MPI.Request, _Bytes]]) -> None:
    """MPI uses the memory of what is under way."""
    if not MPI.Is_finalized():
        MPI.Request.Waitall([request for request, _ in sends])
