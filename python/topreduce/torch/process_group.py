"""Bytes between the ranks of an attached model, over connections of our own.

The core sends and receives by sockets (comm/sockets.h); here is who the ranks are, how they meet,
and what becomes of one that is lost.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.constants import default_pg_timeout

from topreduce import CommError, Communicator
from topreduce.torch import connections
from topreduce.torch.arrivals import Arrivals, explain
from topreduce.torch.device_group import DeviceGroup, backend_of
from topreduce.torch.meeting import (
    STORE_PATIENCE,
    Ranks,
    attempt,
    legible,
    meet,
    refused,
    sendable,
    with_patience,
)

_FRAMES = 1 << 24  # bytes, about, of one frame from every peer
_LEAST_FRAME, _LARGEST_FRAME = 1 << 14, 1 << 20
_SIGN_OF_LIFE = 1.0  # seconds, at most, between two of a rank that waits
_EXCUSED = 4  # time-outs to wait for peers that wait themselves: the waits of a step may add up
_LAST_WORD = 2.0  # seconds that bytes get to leave before a connection is closed
_LONGEST_WORD = 2000  # letters
_TIMED_OUT = "Timed out"
_FLAT = "no local_group"


@dataclass(frozen=True)
class Circle:
    """Some ranks of a process group, as messages and the store call them."""

    group_name: str  # unlike that of any other circle
    ranks: Sequence[int]  # in the process group
    place: int  # of this rank in the circle
    title: str
    everyone: "GroupCommunicator | None" = None  # of the process group, if they are connected

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return len(self.ranks)


class GroupCommunicator(Communicator):
    """The ranks of `group`, on connections that nobody else uses. Making one is collective."""

    def __init__(self, group: dist.ProcessGroup | Ranks | Circle, timeout: timedelta) -> None:
        limit = min(max(_FRAMES // group.size(), _LEAST_FRAME), _LARGEST_FRAME)
        super().__init__(group.rank(), group.size(), limit)
        self._names = list(group.ranks if isinstance(group, Circle) else range(self.size))
        self.title = (
            group.title if isinstance(group, Circle) else f"rank {self.rank} of {self.size}"
        )
        # Whether an error that all ranks of a call notice reaches all ranks of the model.
        self.all_hear = not isinstance(group, Circle)
        self.set_names(self.title, self._names, self.all_hear)
        # What is owed is kept by every rank: this one keeps book `ledger` of `ledgers`.
        self.ledger, self.ledgers = self.rank, self.size
        self.timeout = timeout
        self._waited = 0.0  # seconds of the wait that lasts, or was the last
        self._signs: dict[int, float] = {}  # when peers said in it that they wait themselves
        self._said = 0.0  # when this rank said so, to those in `beside`
        self.beside: list[GroupCommunicator] = []  # this rank's other circles, where peers may wait
        # Circles of which each call here needs all ranks until it ends: losing one ends a wait.
        self.needed: list[GroupCommunicator] = []
        self._cause = ""  # why peers gave up, in the words of the first
        self._gloo: Any = None  # for reduce=native in main memory
        self._device_backend: Any = None  # see `find_device_backend`
        self._devices: DeviceGroup | None = None
        self._gone: set[int] = set()  # peers of whom nothing more is heard
        self._loss = ""  # the first of them, and why, in words
        self._store = meet(group, self._names, timeout)
        # After a time-out everyone is asked: who is missed here may be waiting elsewhere.
        self._arrivals: Arrivals = (
            group.everyone._arrivals
            if isinstance(group, Circle) and group.everyone is not None
            else Arrivals(self._store, self.rank, self._names, timeout, "waited")
        )
        # Tells what these ranks save together from what others did before, or will.
        self.run = secrets.token_hex(8)
        if self.rank == 0:
            self._store.set("run", self.run)
        if self.size > 1:
            self.connect(
                connections.connect(self._store, self.rank, self.size, self._names, timeout)
            )
            self.run = legible(self._store.get("run"))
        self._open = self.size > 1
        self.enter("attach")

    def concur(self, word: str) -> None:
        """Returns if all ranks came with the same word, and none with a refusal (`refusal_of`);
        otherwise ValueError, on all of them.
        """
        expect_same({f"rank {rank}": each for rank, each in enumerate(self.ask(word))})

    def ask(self, word: str) -> list[str]:
        """The words with which the ranks came, in rank order."""
        received, counts = self.all_gather(np.frombuffer(sendable(word).encode(), np.uint8))
        return [legible(part.tobytes()) for part in np.split(received, np.cumsum(counts)[:-1])]

    def ask_everyone(self, word: str) -> list[str]:
        """The same of all ranks of the model, where those of this group are not all."""
        return self.ask(word)

    def find_device_backend(self, group: object, device: torch.device | None) -> None:
        """Finds out whether all ranks have devices of one kind, and their `group` a backend for
        them. Collective; `device`: None if this rank has none.
        """
        like = None if device is None else backend_of(group, device)
        backend = "" if device is None or like is None else f" on {device.type}, {like.name()}"
        words = self.ask(f"{_FLAT}{backend}")
        if not all(word.startswith(_FLAT) for word in words):  # of another kind of attach()
            expect_same({f"rank {rank}": word for rank, word in enumerate(words)})
        self._device_backend = like if backend and len(set(words)) == 1 else None

    @property
    def has_devices(self) -> bool:
        """Whether `devices` can be used."""
        return self._device_backend is not None

    def adder(self) -> Callable[[], DeviceGroup] | None:
        """Who adds up on the devices of those that exchange; None if they cannot."""
        return (lambda: self.devices) if self.has_devices else None

    @property
    def devices(self) -> DeviceGroup:
        """The ranks' devices; the first look is collective."""
        if self._devices is None:
            self._devices = DeviceGroup(
                self._device_backend, self._store, self.rank, self.size, self.timeout, self.title
            )
        return self._devices

    def close(self, word: str = "") -> None:
        """Leaves, for good. Peers that wait for us fail at once, and find `word` as the reason."""
        if self._open and word:
            self._tell(self._cause or f"rank {self._names[self.rank]} gave up: {word}")
        self._open = False
        self.end_threads()
        if self._devices is not None:
            self._devices.close()
        self.interrupt("is out of reach: the group is closed")
        self.disconnect()

    def interrupt(self, why: str) -> None:
        """Ends a wait of another thread, and all that follow."""
        for peer in self._others():
            self.lose(peer, why)
        self.wake()

    def end_threads(self) -> None:
        """Those of Gloo's that add up for us. Nothing may be under way: they are waited for."""
        self._gloo = None

    # ---- what the core calls ----

    def send_frame(self, peer: int, frame: NDArray[np.uint8]) -> None:
        """After `close` there is no connection; a rank that waits for an answer learns of it."""

    def heard(self, peer: int, word: bytes) -> None:
        """The last word of a peer."""
        self._gone.add(peer)
        cause = legible(word)
        self._cause = self._cause or cause
        why = cause.removeprefix(f"rank {self._names[peer]} gave up: ")
        absent: list[int] = []
        if _TIMED_OUT in cause:
            with_patience(self._arrivals.check_in)
            for circle in self.beside:
                circle._tell(cause)
            absent = self._absent_ranks()
        reason = f" ({explain(absent)})" if absent else ""
        self._lose_for_good(peer, f"gave up: {why}{reason}")
        # Nobody waits another time-out for those that the peer has missed.
        for place in self._others():
            if self._names[place] in absent and place not in self._gone:
                self.lose(place, f"is silent: {cause}{reason}")

    def lost(self, peer: int, why: str) -> None:
        """A connection is gone. What the peer had to say may be in the store."""
        if peer in self._gone:
            return
        self._gone.add(peer)
        store, key = self._store, f"word/{peer}"
        word = with_patience(lambda: legible(store.get(key)) if store.check([key]) else "")
        self._cause = self._cause or word or ""
        silence = "it gave no reason: it may have died, or the network is down"
        self._lose_for_good(peer, f"is gone: {why} ({word or silence})")

    def _lose_for_good(self, peer: int, why: str) -> None:
        self._loss = self._loss or f"rank {self._names[peer]} {why}"
        self.lose(peer, why)

    def native_all_reduce(self, values: NDArray[np.float32]) -> None:
        """By Gloo, in a group of our own that the first call makes."""
        if self._gloo is None:
            store = PrefixStore("native", self._store)
            self._gloo, failure = attempt(
                lambda: dist.ProcessGroupGloo(store, self.rank, self.size, timeout=self.timeout)
            )
            if failure:
                raise CommError(
                    f"{self.title}, {self.whereabouts()}: reduce=native: no connection by Gloo: "
                    f"{failure}"
                )
        tensor = torch.from_numpy(values)
        _, failure = attempt(lambda: self._gloo.allreduce([tensor]).wait())
        if failure:
            raise CommError(
                f"{self.title}, {self.whereabouts()}, an exchange by reduce=native: Gloo's "
                f"all-reduce failed: {failure}"
            )

    def waits(self, peer: int) -> None:
        self._signs[peer] = self._waited
        self._excuse()

    def still_waiting(self, seconds: float) -> None:
        if seconds < self._waited:  # another wait
            self._signs.clear()
        self._waited = seconds
        for circle in self.needed:
            circle.look()
            if circle._gone:
                return self.interrupt(f"is waited for no longer: {circle._loss}")
        silent = self._silent()
        if silent:
            return self._give_up_waiting(silent)
        self._excuse()

    def _others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _excuse(self) -> None:
        """Tells those who may wait for this rank elsewhere that it is here, and waits as well."""
        now = time.monotonic()
        if self.beside and now - self._said > min(_SIGN_OF_LIFE, self.timeout.total_seconds() / 4):
            self._said = now
            for circle in self.beside:
                circle.say_waiting()

    def _silent(self) -> list[int]:
        """Peers that are waited for, and have been silent for too long."""
        timeout = self.timeout.total_seconds()
        if self._waited <= timeout:
            return []
        awaited = self.awaited() or self._others()
        if self._waited > _EXCUSED * timeout:
            return awaited
        return [peer for peer in awaited if self._waited - self._signs.get(peer, 0.0) > timeout]

    def _give_up_waiting(self, silent: Sequence[int]) -> None:
        """Nothing came in time: peers that wait fail at once, and say that they were here."""
        waited = f"{_TIMED_OUT} waiting {self.timeout // timedelta(milliseconds=1)}ms"
        cause = f"rank {self._names[self.rank]} gave up: CommError: {waited}"
        with_patience(self._arrivals.check_in)
        for circle in (*self.beside, self):  # a silent peer may take its time
            circle._tell(cause)
        absent = self._absent_ranks()
        reason = f" ({explain(absent)})" if absent else ""
        for peer in silent:
            self.lose(peer, f"is silent: {waited}{reason}")

    def _absent_ranks(self) -> list[int]:
        """After a time-out: who did not come."""
        patience = self._arrivals.patience + STORE_PATIENCE
        return with_patience(self._arrivals.absent, patience) or []

    def _tell(self, cause: str) -> None:
        """The last word to all peers; by the store where a connection is full."""
        word = sendable(cause)[:_LONGEST_WORD]
        if self.say(word, _LAST_WORD):
            with_patience(lambda: self._store.set(f"word/{self.rank}", word))


def expect_same(words: Mapping[str, str]) -> None:
    """ValueError unless all ranks, by name, came with the same word, and none with a refusal."""
    refusals = [f"{who} {word}" for who, word in words.items() if word.startswith("refused: ")]
    if refusals:
        raise ValueError(refused(refusals))
    if len(set(words.values())) > 1:
        told = "; ".join(f"{who}: {word}" for who, word in words.items())
        raise ValueError(f"the ranks differ, so nothing was changed: {told}")


def timeout_of(group: dist.ProcessGroup | Ranks, device: torch.device) -> timedelta:
    """How long operations of this group wait, for tensors of this device."""
    if isinstance(group, Ranks):
        return default_pg_timeout
    backend, _ = attempt(lambda: group._get_backend(device))
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else default_pg_timeout
