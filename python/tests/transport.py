"""A little transport written in Python: ranks are threads, a message is bytes in a queue."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from topreduce import CommError, Communicator

Bytes = NDArray[np.uint8]
T = TypeVar("T")
_PATIENCE = 60.0  # seconds
AGREE, STEP = 2, 6  # kinds of places
_FRAME_HEAD = 18  # bytes, of a frame that says where its sender is


def start_of(frame: Bytes) -> int:
    """Where its messages start."""
    return 1 if frame[0] == ord("t") else _FRAME_HEAD


def place_of(frame: Bytes) -> tuple[int, int] | None:
    """Where its sender is: the kind of the place, and the step; None if a frame before said it."""
    if start_of(frame) == 1:
        return None
    return int(frame[3]), int(frame[4:12].view(np.uint64)[0])


class Mail:
    """One queue from every rank to every rank."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._lines: dict[tuple[int, int], queue.SimpleQueue[bytes | None]] = {
            (sender, receiver): queue.SimpleQueue()
            for sender in range(ranks)
            for receiver in range(ranks)
        }

    def send(self, sender: int, receiver: int, letter: bytes | None) -> None:
        self._lines[sender, receiver].put(letter)

    def receive(self, sender: int, receiver: int) -> Iterator[bytes | None]:
        """What has come; None once the sender has gone."""
        line = self._lines[sender, receiver]
        while not line.empty():
            yield line.get()

    def leave(self, rank: int) -> None:
        for receiver in range(self.ranks):
            self.send(rank, receiver, None)


class QueueRank(Communicator):
    """What a user would write to bring another network."""

    def __init__(self, rank: int, mail: Mail) -> None:
        super().__init__(rank, mail.ranks)
        self._mail = mail

    def send_frame(self, peer: int, frame: Bytes) -> None:
        self._mail.send(self.rank, peer, frame.tobytes())

    def receive_frames(self) -> None:
        for peer in range(self.size):
            for letter in self._mail.receive(peer, self.rank):
                if letter is None:
                    self.lose(peer, "has gone")
                else:
                    self.accept(peer, np.frombuffer(letter, np.uint8))

    def still_waiting(self, seconds: float) -> None:
        if seconds > _PATIENCE:
            raise CommError(f"rank {self.rank} has waited long enough")


def alone() -> QueueRank:
    """The only rank."""
    return QueueRank(0, Mail(1))


def run_threads(
    ranks: int,
    body: Callable[[QueueRank], T],
    make: Callable[[int, Mail], QueueRank] = QueueRank,
) -> list[T | Exception]:
    """body(comm) on every rank: its result, or what it raised. A rank that ends takes its leave."""
    mail = Mail(ranks)
    outcomes: list[T | Exception] = [RuntimeError("did not end")] * ranks

    def run(rank: int) -> None:
        try:
            outcomes[rank] = body(make(rank, mail))
        except Exception as error:
            outcomes[rank] = error
        finally:
            mail.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PATIENCE)
    return outcomes
