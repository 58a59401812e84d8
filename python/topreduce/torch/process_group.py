"""Bytes between the ranks of a DDP model, over a Gloo group of our own.

Every call begins with a round that has room for any message but a long one. Gloo lets a rank send
less than its peer has room for, and ends the process if it is more; so ranks that are at different
places of their program find out instead of dying:

    [ heading | the message, unless it is long ]   ->   [ the messages, if one is long ]

All ranks see all headings (heading.py): all know whether there is a second round.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from topreduce import CommError, Communicator, WireError
from topreduce.torch.heading import SIZE, Bytes, Doing, Heading, Place, differences
from topreduce.torch.meeting import (
    STORE_PATIENCE,
    attempt,
    legible,
    meet,
    sendable,
    with_patience,
)
from topreduce.torch.roll_call import RollCall, explain

ANY_TEXT = 1 << 26  # bytes: what ranks compare before they know each other's models
_ROOM = 1 << 20  # bytes; a second round takes little beside what is longer
_SMALL_BUFFER = 1 << 16
_BYTES_AN_ENTRY = 16  # value and index, at their longest, and room for headers
_TIMED_OUT = "Timed out"  # in Gloo's words


@dataclass(frozen=True)
class Circle:
    """Some ranks of a process group, as messages and the store call them."""

    group_name: str  # unlike that of any other circle
    ranks: Sequence[int]  # in the process group
    place: int  # of this rank in the circle
    title: str

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return len(self.ranks)


class GroupCommunicator(Communicator):
    """The ranks of `group`, on connections that nobody else uses. Making one is collective."""

    def __init__(self, group: dist.ProcessGroup | Circle, timeout: timedelta) -> None:
        super().__init__(group.rank(), group.size())
        self._calls = 0
        self._doing = Doing.ATTACH
        self._step = 0
        self._calls_before_step = 0
        self._told = False
        self._names = group.ranks if isinstance(group, Circle) else range(self.size)
        self.title = (
            group.title if isinstance(group, Circle) else f"rank {self.rank} of {self.size}"
        )
        # Whether an error that all ranks of a call notice reaches all ranks of the model.
        self.all_hear = not isinstance(group, Circle)
        # What is owed is kept by every rank: this one keeps book `ledger` of `ledgers`.
        self.ledger, self.ledgers = self.rank, self.size
        # Of one message: peers are not trusted with how much memory they are given.
        self.most_bytes = ANY_TEXT
        self._buffers: dict[str, torch.Tensor] = {}
        self._used: dict[str, int] = {}  # bytes of each buffer, at most, since the last `trim`
        self._headings = [np.empty(SIZE, np.uint8) for _ in range(self.size)]
        self._store = meet(group, self._names, timeout)
        self._waiting = RollCall(self._store, self.rank, self._names, timeout, "waited")
        self._gloo: Any = None
        if self.size > 1:
            self._gloo, failure = attempt(
                lambda: dist.ProcessGroupGloo(self._store, self.rank, self.size, timeout=timeout)
            )
            if failure:
                raise CommError(f"{self.title}: no connection: {failure}")

    def start_step(self, step: int) -> None:
        """From here on messages and errors name this step, and `calls_in_step` counts."""
        self.announce(Doing.STEP, step)

    def announce(self, doing: Doing, step: int) -> None:
        """What peers are told with the messages that follow."""
        self._doing, self._step = doing, step
        self._calls_before_step = self._calls

    @property
    def calls_in_step(self) -> int:
        """Since the last announcement, or since all ranks dropped what they were about."""
        return self._calls - self._calls_before_step

    def trim(self) -> None:
        """Frees buffers far larger than what came since the last call: dense steps leave them."""
        for name, buffer in list(self._buffers.items()):
            if buffer.numel() > 2 * self._used.pop(name, 0) + _SMALL_BUFFER:
                del self._buffers[name]

    def all_to_all(self, send: Bytes, counts: Sequence[int]) -> tuple[Bytes, list[int]]:
        return self._exchange(np.split(send, np.cumsum(counts)[:-1]), lambda: send)

    def all_gather(self, mine: Bytes) -> tuple[Bytes, list[int]]:
        def repeated() -> Bytes:
            copies = self._buffer("repeated", self.size * mine.size)
            copies.reshape(self.size, -1)[:] = mine
            return copies

        return self._exchange([mine] * self.size, repeated)

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

    def hand_out(self, message: Bytes) -> None:
        """Replaces `message` by that of rank 0. All know its length, from a call before."""
        if self.size > 1:
            self._calls += 1
            tensor = torch.from_numpy(message)
            self._round(lambda: self._gloo.broadcast(tensor, 0).wait())

    def allow_for(self, entries: int) -> None:
        """Messages may be as long as all gradients of a model with so many entries need."""
        self.most_bytes = ANY_TEXT + _BYTES_AN_ENTRY * entries

    def close(self, word: str = "") -> None:
        """Leaves. Peers that wait for us fail at once, and find `word` as the reason."""
        if word and not self._told:
            with_patience(lambda: self._store.set(f"word/{self.rank}", sendable(word)))
        self._gloo = None  # the last reference: this closes the connections

    def _exchange(
        self, parts: list[Bytes], in_one_piece: Callable[[], Bytes]
    ) -> tuple[Bytes, list[int]]:
        """Sends parts[r] to rank r."""
        if self.size == 1:
            return parts[0], [parts[0].size]
        self._calls += 1
        counts = [part.size for part in parts]
        short = [part if part.size <= _ROOM else part[:0] for part in parts]
        exchange = self._calls - self._calls_before_step if self._doing == Doing.STEP else 0
        place = Place(self._doing, self._step, exchange)
        for piece, count in zip(self._headings, counts, strict=True):
            Heading(self._calls, place, count, max(counts)).write(piece)
        pieces = [piece for pair in zip(self._headings, short, strict=True) for piece in pair]
        lengths = [SIZE + part.size for part in short]
        first = self._buffer("first out", sum(lengths))
        np.concatenate(pieces, out=first)
        room = [SIZE + _ROOM] * self.size
        room[self.rank] = lengths[self.rank]  # Gloo wants the same of what stays here
        first_in = self._buffer("first in", sum(room))
        self._transfer(first, first_in, lengths, room)
        rows = np.split(first_in, np.cumsum(room)[:-1])
        incoming, largest = self._lengths(
            [Heading.read(row[:SIZE], self.most_bytes) for row in rows]
        )

        received = self._buffer("received", sum(incoming))
        if largest > _ROOM:
            self._transfer(in_one_piece(), received, counts, incoming)
        else:
            messages = [row[SIZE:][:n] for row, n in zip(rows, incoming, strict=True)]
            np.concatenate(messages, out=received)
        return received, incoming

    def _lengths(self, headings: list[Heading | None]) -> tuple[list[int], int]:
        """Bytes from each rank, and the most between any two ranks."""
        heard: list[Heading] = []
        for name, heading in zip(self._names, headings, strict=True):
            if heading is None:
                raise WireError(f"{self._where()}: a damaged or foreign message from rank {name}")
            heard.append(heading)
        where, error = self._where(), differences([each.place for each in heard], self._names)
        ahead = [heading.call - self._calls for heading in heard]
        if error and self.all_hear and not any(ahead):
            self._calls_before_step = self._calls  # all of them drop what they were about
            raise ValueError(f"{where}: {error}")
        if error or any(ahead):
            raise WireError(f"{where}: {error or f'ranks are out of step, by {ahead} calls'}")
        return [heading.length for heading in heard], max(heading.longest for heading in heard)

    def _transfer(self, send: Bytes, out: Bytes, counts: list[int], out_counts: list[int]) -> None:
        """One round: counts[r] bytes to rank r, at most out_counts[r] from it."""
        tensors = torch.from_numpy(out), torch.from_numpy(send)
        self._round(lambda: self._gloo.alltoall_base(*tensors, out_counts, counts).wait())

    def _round(self, action: Callable[[], object]) -> None:
        if self._gloo is None:
            raise CommError(f"{self._where()}: the group is closed")
        _, failure = attempt(action)
        if failure:
            raise CommError(f"{self._where()}: {failure} ({self._reason(failure)})")

    def _reason(self, failure: str) -> str:
        """What peers said; after a time-out, who did not come. Ends the connections."""
        with_patience(self._waiting.answer)
        words = self._words()
        self._told = bool(words)  # someone else is the cause: leave the word to them
        if _TIMED_OUT in failure and not words:
            self.close(f"CommError: {failure}")  # peers that wait fail at once, and answer too
        if any(_TIMED_OUT in each for each in (failure, *words)):
            patience = self._waiting.patience + STORE_PATIENCE
            absent = with_patience(self._waiting.absent, patience)
            words += [explain(absent)] if absent else []
        silence = "no rank left a word; one may have died, or the network is down"
        return "; ".join(words) or silence

    def _words(self) -> list[str]:
        """What peers said when they gave up."""

        def read() -> list[str]:
            keys = {peer: f"word/{peer}" for peer in range(self.size) if peer != self.rank}
            return [
                f"rank {self._names[peer]} gave up: {legible(self._store.get(key))}"
                for peer, key in keys.items()
                if self._store.check([key])
            ]

        return with_patience(read) or []

    def _where(self) -> str:
        return f"{self.title}, step {self._step}, exchange {self.calls_in_step}"

    def _buffer(self, name: str, size: int) -> Bytes:
        """Memory that is reused from call to call."""
        self._used[name] = max(size, self._used.get(name, 0))
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(
                size + size // 8, dtype=torch.uint8, device="cpu"
            )
        return buffer[:size].numpy()


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long operations of this group wait, for tensors of this device."""
    backend, _ = attempt(lambda: group._get_backend(device))
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else default_pg_timeout
