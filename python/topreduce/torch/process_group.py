"""Bytes between the ranks of a DDP model, over a Gloo group of our own.

A message and its length travel together. Every call sends one slot of fixed size to each rank, the
lengths in front; only what did not fit goes in a second round:

    [ heading | first bytes of the message ]   ->   [ the rest ]   (only if some rank has a rest)

All ranks see all lengths, so all of them know whether there is a second round, and all of them plan
the same slot for the same place of the next step. In a steady run one call is one round.
"""

import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from topreduce import CommError, Communicator, WireError

Bytes = NDArray[np.uint8]
T = TypeVar("T")

_MAGIC = 0x746F7072656475  # "topredu"
_HEADING = 5  # words: magic, number of the call, bytes to you, most bytes to anyone, bytes to all
_WORD = 8
_FIRST_SLOT = 1024
# Bytes that a slot may waste for each rank, and the size above which a second round, that needs
# no copy, costs less than the padding.
_SPARE = 2048
_LARGEST_SLOT = 1 << 20
_STORE_PATIENCE = 2.0  # seconds; the machine that holds the store may be the one that died


class GroupCommunicator(Communicator):
    """The ranks of `group`, on connections that nobody else uses. Making one is collective."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        super().__init__(group.rank(), group.size())
        self.calls = 0
        self._place = 0
        self._step = 0
        self._slots: list[int] = []
        self._told = False
        self._buffers: dict[str, torch.Tensor] = {}
        # Not dist.new_group: it wants the whole world, or names groups by their ranks so that a
        # second one with the same ranks finds the addresses of the first.
        store = group.get_group_store()
        generation = store.add(f"topreduce/attached/{self.rank}", 1)
        self._store = dist.PrefixStore(f"topreduce/{generation}", store)
        self._gloo: dist.ProcessGroupGloo | None = None
        if self.size > 1:
            self._gloo, failure = _attempt(
                lambda: dist.ProcessGroupGloo(self._store, self.rank, self.size, timeout=timeout)
            )
            if failure:
                raise CommError(
                    f"rank {self.rank} of {self.size}: could not reach all ranks within {timeout}; "
                    f"every rank of the model's process group must call attach(): {failure}"
                )

    def start_step(self, step: int) -> None:
        """From here on calls have the places that they had in the step before."""
        self._step = step
        self._place = 0

    def all_to_all(self, send: Bytes, counts: Sequence[int]) -> tuple[Bytes, list[int]]:
        return self._exchange(np.split(send, np.cumsum(counts)[:-1]), send)

    def all_gather(self, mine: Bytes) -> tuple[Bytes, list[int]]:
        return self._exchange([mine] * self.size, None)

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text; what is not text is shown as well as it can be."""
        received, counts = self.all_gather(np.frombuffer(text.encode(), np.uint8))
        parts = np.split(received, np.cumsum(counts)[:-1])
        return [part.tobytes().decode(errors="replace") for part in parts]

    def close(self, word: str = "") -> None:
        """Leaves. Peers that wait for us fail at once, and find `word` as the reason."""
        if word and not self._told:
            _with_patience(lambda: self._store.set(f"word/{self.rank}", word))
        self._gloo = None  # the last reference: this closes the connections

    def _exchange(self, parts: list[Bytes], whole: Bytes | None) -> tuple[Bytes, list[int]]:
        """Sends parts[r] to rank r. `whole`: the parts, if they stand one after the other."""
        if self.size == 1:
            return parts[0], [parts[0].size]
        self.calls += 1
        if self._place == len(self._slots):
            self._slots.append(_FIRST_SLOT)
        slot = self._slots[self._place]

        counts = [part.size for part in parts]
        rows = self._buffer("slots out", self.size * (_HEADING * _WORD + slot))
        rows = rows.reshape(self.size, -1)
        heading = rows.view(np.int64)
        heading[:, :_HEADING] = (_MAGIC, self.calls, 0, max(counts), sum(counts))
        heading[:, 2] = counts
        for row, part in zip(rows, parts, strict=True):
            first = part[:slot]
            row[_HEADING * _WORD :][: first.size] = first
        inbox = self._buffer("slots in", rows.size)
        self._transfer(rows.reshape(-1), inbox, [], [])
        inbox = inbox.reshape(self.size, -1)
        incoming, largest, total = self._read(inbox.view(np.int64)[:, :_HEADING])
        self._slots[self._place] = _plan(largest, total // self.size**2)
        self._place += 1

        rest = self._buffer("rest in", sum(max(count - slot, 0) for count in incoming))
        if largest > slot:
            outgoing = [part[slot:] for part in parts]
            self._transfer(
                whole if slot == 0 and whole is not None else np.concatenate(outgoing),
                rest,
                [part.size for part in outgoing],
                [max(count - slot, 0) for count in incoming],
            )
        if slot == 0:
            return rest, incoming
        pieces = []
        for row, count in zip(inbox, incoming, strict=True):
            pieces.append(row[_HEADING * _WORD :][: min(count, slot)])
            pieces.append(rest[: max(count - slot, 0)])
            rest = rest[max(count - slot, 0) :]
        received = self._buffer("received", sum(incoming))
        np.concatenate(pieces, out=received)
        return received, incoming

    def _read(self, headings: NDArray[np.int64]) -> tuple[list[int], int, int]:
        """Bytes from each rank; most bytes of any pair; bytes of all. Trusts no peer."""
        incoming, largest, total = [], 0, 0
        for peer, (magic, call, count, most, everything) in enumerate(headings.tolist()):
            if magic != _MAGIC or not 0 <= count <= most <= everything < 1 << 48:
                raise WireError(f"{self._where()}: a damaged or foreign message from rank {peer}")
            if call != self.calls:
                raise WireError(
                    f"{self._where()}: rank {peer} is at its call {call}, we are at {self.calls}; "
                    "attach, configure, bypass, resume and backward must come in the same order "
                    "on all ranks"
                )
            incoming.append(count)
            largest = max(largest, most)
            total += everything
        return incoming, largest, total

    def _transfer(self, send: Bytes, out: Bytes, counts: list[int], out_counts: list[int]) -> None:
        """One round; without counts, the same number of bytes to and from every rank."""
        if self._gloo is None:
            raise CommError(f"{self._where()}: the group is closed")
        _, failure = _attempt(lambda: self._all_to_all(send, out, counts, out_counts))
        if failure:
            words = self._words()
            self._told = bool(words)  # someone else is the cause: leave the word to them
            silence = "no rank left a word; one may have died, or the network is down"
            raise CommError(f"{self._where()}: {failure} ({'; '.join(words) or silence})")

    def _all_to_all(
        self, send: Bytes, out: Bytes, counts: list[int], out_counts: list[int]
    ) -> None:
        tensors = torch.from_numpy(out), torch.from_numpy(send)
        self._gloo.alltoall_base(*tensors, out_counts, counts).wait()

    def _words(self) -> list[str]:
        """What peers said when they gave up."""

        def read() -> list[str]:
            keys = {peer: f"word/{peer}" for peer in range(self.size) if peer != self.rank}
            return [
                f"rank {peer} gave up: {self._store.get(key).decode(errors='replace')}"
                for peer, key in keys.items()
                if self._store.check([key])
            ]

        return _with_patience(read) or []

    def _where(self) -> str:
        return f"rank {self.rank} of {self.size}, step {self._step}, exchange {self._place + 1}"

    def _buffer(self, name: str, size: int) -> Bytes:
        """Memory that is reused from call to call."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size + size // 8, dtype=torch.uint8)
        return buffer[:size].numpy()


def _plan(largest: int, average: int) -> int:
    """The slot for messages like these: all of them fit, with little padding; or none."""
    slot = (largest + largest // 64 + _WORD) // _WORD * _WORD
    spare = max(_SPARE, average // 16)
    return slot if slot <= _LARGEST_SLOT and slot - average <= spare else 0


def _attempt(action: Callable[[], T]) -> tuple[T | None, str]:
    """The result, or what went wrong in words: an exception would keep the group alive."""
    try:
        return action(), ""
    except RuntimeError as error:
        # Gloo puts a file name before and advice after what happened.
        return None, re.sub(r"^\[\S*\] | This is typically.*", "", str(error), flags=re.DOTALL)


def _with_patience(action: Callable[[], T]) -> T | None:
    """The result, or None if it failed or takes too long: the store may have died as well."""
    results: list[T | None] = []
    thread = threading.Thread(target=lambda: results.append(_attempt(action)[0]), daemon=True)
    thread.start()
    thread.join(_STORE_PATIENCE)
    return results[0] if results else None
