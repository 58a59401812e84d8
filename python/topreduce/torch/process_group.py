"""Bytes between the ranks of a DDP model, over a Gloo group of our own.

Gloo fills memory that was promised to it, in a thread of its own. So every peer is promised a few
places before it sends anything, and the core looks at them without waiting: a thread that waits in
Gloo is released by nobody but the peer, and a time-out there breaks all connections. A place holds

    size, 32 bits | kind, 32 bits | frames that came the other way, 64 bits | the frame | mark

The size is 0 before, and the mark is another one for every frame: Gloo fills memory in order, so
with the right mark all of it is there.
"""

import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.constants import default_pg_timeout

from topreduce import CommError, Communicator
from topreduce.torch.meeting import (
    STORE_PATIENCE,
    attempt,
    legible,
    meet,
    sendable,
    with_patience,
)
from topreduce.torch.roll_call import RollCall, explain

Bytes = NDArray[np.uint8]

_HEAD, _MARK = struct.Struct("<IIQ"), struct.Struct("<Q")
_FRAME, _NOTE, _WORD, _HERE = range(4)
# Kinds: bytes of the core; nothing; why a rank has left; it waits itself, in another circle.
_EVERYTHING, _NOBODY = 0, 1  # tags
_PLACES = 8  # for frames of one peer
_ALL_PLACES = 1 << 24  # bytes, about, over all peers
_LEAST_FRAME, _LARGEST_FRAME = 1 << 14, 1 << 18
_UNTOLD = 16  # frames that are taken until their sender is told, which else hears it by the way
_LAST_WORD = timedelta(seconds=2)  # that bytes get to leave before a connection is closed
_LONGEST_WORD = 2000  # letters; it must fit into a frame
_SIGN_OF_LIFE = 1.0  # seconds of a wait, at least, between questions whether peers still live
_EXCUSED = 4  # time-outs to wait for peers that wait themselves: the waits of a step may add up
_TIMED_OUT = "Timed out"
_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Circle:
    """Some ranks of a process group, as messages and the store call them."""

    group_name: str  # unlike that of any other circle
    ranks: Sequence[int]  # in the process group
    place: int  # of this rank in the circle
    title: str
    everyone: "GroupCommunicator"  # of the process group

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return len(self.ranks)


class _Line:
    """What is under way between this rank and another."""

    def __init__(self) -> None:
        # Memory and the work on it: in this order, so that Gloo lets go of it first.
        self.places: deque[tuple[torch.Tensor, Any]] = deque()
        self.sends: deque[tuple[torch.Tensor, Any]] = deque()
        self.sent = 0  # frames; the last ones are in `sends`
        self.taken = 0  # frames of the peer
        self.told = 0  # how many of them the peer knows to be taken
        self.gone = False
        self.heard = 0.0  # seconds after the wait began, when the peer said that it waits itself


class GroupCommunicator(Communicator):
    """The ranks of `group`, on connections that nobody else uses. Making one is collective."""

    def __init__(self, group: dist.ProcessGroup | Circle, timeout: timedelta) -> None:
        room = min(max(_ALL_PLACES // _PLACES // group.size(), _LEAST_FRAME), _LARGEST_FRAME)
        super().__init__(group.rank(), group.size(), room - _HEAD.size - _MARK.size)
        self._names = list(group.ranks if isinstance(group, Circle) else range(self.size))
        self.title = (
            group.title if isinstance(group, Circle) else f"rank {self.rank} of {self.size}"
        )
        # Whether an error that all ranks of a call notice reaches all ranks of the model.
        self.all_hear = not isinstance(group, Circle)
        self.introduce(self.title, self._names, self.all_hear)
        # What is owed is kept by every rank: this one keeps book `ledger` of `ledgers`.
        self.ledger, self.ledgers = self.rank, self.size
        self._timeout = timeout
        self._waited = 0.0  # seconds of the wait that lasts, or was the last
        self._asked = 0.0  # for signs of life, seconds after the wait began
        self._said = 0.0  # when this rank gave one, to those in `beside`
        self.beside: list[GroupCommunicator] = []  # this rank's other circles, where peers may wait
        self._cause = ""  # why peers gave up, in the words of the first
        self._store = meet(group, self._names, timeout)
        # After a time-out everyone is asked: who is missed here may be waiting elsewhere.
        self._waiting: RollCall = (
            group.everyone._waiting
            if isinstance(group, Circle)
            else RollCall(self._store, self.rank, self._names, timeout, "waited")
        )
        self._lines: dict[int, _Line] = {}
        self._nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._gloo: Any = None
        if self.size > 1:
            self._connect(room)
        self.enter("attach")

    def concur(self, word: str) -> None:
        """Returns if all ranks came with the same word; otherwise ValueError, on all of them."""
        words = self.ask(word)
        if len(set(words)) > 1:
            by_rank = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(words))
            raise ValueError(f"the ranks differ, so nothing was changed: {by_rank}")

    def ask(self, word: str) -> list[str]:
        """The words with which the ranks came, in rank order."""
        received, counts = self.all_gather(np.frombuffer(sendable(word).encode(), np.uint8))
        return [legible(part.tobytes()) for part in np.split(received, np.cumsum(counts)[:-1])]

    def close(self, word: str = "") -> None:
        """Leaves, for good. Peers that wait for us fail at once, and find `word` as the reason."""
        if self._gloo is not None and word:
            self._tell(self._cause or f"rank {self._names[self.rank]} gave up: {word}")
        self.interrupt("is out of reach: the group is closed")
        self._lines.clear()
        self._gloo = None  # the last reference: this closes the connections
        self.watch(None)

    def interrupt(self, why: str) -> None:
        """Ends a wait of another thread, and all that follow."""
        for peer in self._others():
            self.lose(peer, why)

    # ---- what the core calls ----

    def send_frame(self, peer: int, frame: Bytes) -> None:
        self._send(peer, _FRAME, frame)

    def receive_frame(self, peer: int) -> None:
        line = self._lines.get(peer)
        if line is None or line.gone:
            return
        place, work = line.places.popleft()
        _, failure = attempt(work.wait)  # it is here, and now Gloo says so as well
        if failure:
            return self._lose(peer, failure)
        memory = place.numpy()
        size, kind, taken = _HEAD.unpack_from(memory.data)
        if not _HEAD.size <= size <= memory.size - _MARK.size or taken > line.sent:
            line.gone = True
            return self.lose(peer, "a frame that is none of topreduce's", "damaged")
        while line.sent - len(line.sends) < taken:  # the peer has these
            attempt(line.sends.popleft()[1].wait)
        line.taken += 1
        content = memory[_HEAD.size : size]
        if kind == _WORD:
            return self._hear(peer, legible(content.tobytes()))
        if kind == _FRAME:
            self.accept(peer, content)
        if kind == _HERE:
            line.heard = self._waited
        memory[:4] = 0
        self._promise(peer, place)
        if line.taken - line.told >= _UNTOLD:
            self._send(peer, _NOTE)
        self._excuse()

    def still_waiting(self, seconds: float) -> None:
        if seconds < self._waited:  # another wait
            self._asked = 0.0
            for line in self._lines.values():
                line.heard = 0.0
        self._waited = seconds
        silent = self._silent()
        if silent:
            return self._give_up_waiting(silent)
        self._excuse()
        if seconds - self._asked > min(max(_SIGN_OF_LIFE, seconds / 10), 10 * _SIGN_OF_LIFE):
            self._asked = seconds
            for peer in self.awaited():
                self._probe(peer)

    # ---- connections ----

    def _connect(self, room: int) -> None:
        self._gloo, failure = attempt(
            lambda: dist.ProcessGroupGloo(self._store, self.rank, self.size, timeout=self._timeout)
        )
        if failure:
            raise CommError(f"{self.title}: no connection: {failure}")
        # What nobody writes to takes no memory, such as our own part.
        blocks = torch.zeros((self.size, _PLACES, room), dtype=torch.uint8, device="cpu")
        self.watch(blocks.numpy())
        for peer in self._others():
            self._lines[peer] = _Line()
            for place in blocks[peer]:
                self._promise(peer, place)

    def _promise(self, peer: int, place: torch.Tensor) -> None:
        work, failure = attempt(lambda: self._gloo.recv([place], peer, _EVERYTHING))
        if failure:
            return self._lose(peer, failure)
        self._lines[peer].places.append((place, work))

    def _send(self, peer: int, kind: int, frame: Bytes = _NOTHING) -> None:
        """If it cannot be sent: that is an error once something is expected of this peer."""
        line = self._lines.get(peer)
        if line is None or line.gone:
            return
        size = _HEAD.size + frame.size
        tensor = torch.empty(size + _MARK.size, dtype=torch.uint8, device="cpu")
        memory = tensor.numpy()
        _HEAD.pack_into(memory.data, 0, size, kind, line.taken)
        memory[_HEAD.size : size] = frame
        _MARK.pack_into(memory.data, size, _mark(line.sent + 1))
        work, failure = attempt(lambda: self._gloo.send([tensor], peer, _EVERYTHING))
        if failure:
            return self._lose(peer, failure)
        line.sends.append((tensor, work))
        line.sent += 1
        line.told = line.taken

    def _probe(self, peer: int) -> None:
        """Gloo knows whether the connection is still there; nobody ever takes this."""
        if not self._lines[peer].gone:
            _, failure = attempt(lambda: self._gloo.send([self._nothing], peer, _NOBODY))
            if failure:
                self._lose(peer, failure)

    def _excuse(self) -> None:
        """Tells those who may wait for this rank elsewhere that it is here, and waits as well."""
        now = time.monotonic()
        if self.beside and now - self._said > min(_SIGN_OF_LIFE, self._timeout.total_seconds() / 4):
            self._said = now
            for circle in self.beside:
                for peer in circle._others():
                    circle._send(peer, _HERE)

    def _others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    # ---- peers that are lost ----

    def _hear(self, peer: int, cause: str) -> None:
        """The last word of a peer."""
        self._lines[peer].gone = True
        self._cause = self._cause or cause
        why = cause.removeprefix(f"rank {self._names[peer]} gave up: ")
        roll_call = ""
        if _TIMED_OUT in cause:
            with_patience(self._waiting.answer)
            for circle in self.beside:
                circle._tell(cause)
            roll_call = self._roll_call()
        self.lose(peer, f"gave up: {why}{roll_call}")

    def _lose(self, peer: int, failure: str) -> None:
        """A connection is gone. What the peer said before may be here, or in the store."""
        line = self._lines[peer]
        while not line.gone and line.places and _is_whole(line.places[0][0], line.taken + 1):
            self.receive_frame(peer)
        if line.gone:
            return
        line.gone = True
        store, key = self._store, f"word/{peer}"
        word = with_patience(lambda: legible(store.get(key)) if store.check([key]) else "")
        self._cause = self._cause or word or ""
        silence = "it left no word, and may have died, or the network is down"
        self.lose(peer, f"is gone: {failure} ({word or silence})")

    def _silent(self) -> list[int]:
        """Peers that are waited for, and have been silent for too long."""
        timeout = self._timeout.total_seconds()
        if self._waited <= timeout:
            return []
        awaited = self.awaited() or self._others()
        if self._waited > _EXCUSED * timeout:
            return awaited
        return [peer for peer in awaited if self._waited - self._lines[peer].heard > timeout]

    def _give_up_waiting(self, silent: Sequence[int]) -> None:
        """Nothing came in time: peers that wait fail at once, and say that they were here."""
        waited = f"{_TIMED_OUT} waiting {self._timeout // timedelta(milliseconds=1)}ms"
        cause = f"rank {self._names[self.rank]} gave up: CommError: {waited}"
        with_patience(self._waiting.answer)
        for circle in (*self.beside, self):  # a silent peer may take its time
            circle._tell(cause)
        roll_call = self._roll_call()
        for peer in silent:
            self.lose(peer, f"is silent: {waited}{roll_call}")

    def _roll_call(self) -> str:
        """After a time-out: who did not come."""
        patience = self._waiting.patience + STORE_PATIENCE
        absent = with_patience(self._waiting.absent, patience)
        return f" ({explain(absent)})" if absent else ""

    def _tell(self, cause: str) -> None:
        """The last word to all peers; by the store where a connection is full."""
        word = sendable(cause)[:_LONGEST_WORD]
        lines = {peer: line for peer, line in self._lines.items() if not line.gone}
        for peer in lines:
            self._send(peer, _WORD, np.frombuffer(word.encode(), np.uint8))
        told = [line for line in lines.values() if not line.gone]
        told.sort(key=lambda line: len(line.sends))  # those that will take it at once
        failures = [attempt(partial(line.sends[-1][1].wait, _LAST_WORD))[1] for line in told]
        if any(_TIMED_OUT in failure for failure in failures):
            with_patience(lambda: self._store.set(f"word/{self.rank}", word))
        for line in told:
            line.gone = True


def _is_whole(place: torch.Tensor, number: int) -> bool:
    """Whether a peer's frame of this number has come."""
    memory = place.numpy()
    size, _, _ = _HEAD.unpack_from(memory.data)
    fits = 0 < size <= memory.size - _MARK.size
    return fits and bool(_MARK.unpack_from(memory.data, size)[0] == _mark(number))


def _mark(number: int) -> int:
    """As the core knows it, see Communicator.watch."""
    return number * 0x9E3779B97F4A7C15 % (1 << 64)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long operations of this group wait, for tensors of this device."""
    backend, _ = attempt(lambda: group._get_backend(device))
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else default_pg_timeout
