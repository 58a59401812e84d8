"""A little transport written in Python: ranks are threads, a message is bytes in a queue."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from topreduce import CommError, Communicator

Bytes = NDArray[np.uint8]
T = TypeVar("T")
_PATIENCE = 60.0  # seconds


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

    def receive(self, sender: int, receiver: int) -> bytes:
        letter = self._lines[sender, receiver].get(timeout=_PATIENCE)
        if letter is None:
            raise CommError(f"rank {sender} has gone")
        return letter

    def leave(self, rank: int) -> None:
        for receiver in range(self.ranks):
            self.send(rank, receiver, None)


class QueueRank(Communicator):
    """What a user would write to bring another network."""

    def __init__(self, rank: int, mail: Mail) -> None:
        super().__init__(rank, mail.ranks)
        self.calls = 0
        self._mail = mail

    def all_to_all(self, send: Bytes, counts: Sequence[int]) -> tuple[Bytes, list[int]]:
        self.calls += 1
        ends = np.cumsum(counts)
        for peer in range(self.size):
            part = send[ends[peer] - counts[peer] : ends[peer]]
            self._mail.send(self.rank, peer, part.tobytes())
        letters = [self._mail.receive(peer, self.rank) for peer in range(self.size)]
        return np.frombuffer(b"".join(letters), np.uint8), [len(letter) for letter in letters]

    def all_gather(self, mine: Bytes) -> tuple[Bytes, list[int]]:
        return self.all_to_all(np.tile(mine, self.size), [mine.size] * self.size)


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
