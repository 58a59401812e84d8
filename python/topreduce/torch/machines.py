"""Connections for several ranks per machine: everyone, the ranks of a machine, one of each machine.

    machine 0      machine 1
    0 = 1 = 2      3 = 4 = 5        = inside: gradients, dense, over memory or between devices
    |              |
    +--------------+                - between: one delegate each, over the network card

Everyone talks to everyone only to agree on changes.
"""

import socket
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from topreduce import WireError
from topreduce.torch.device_group import DeviceGroup
from topreduce.torch.process_group import Circle, GroupCommunicator

Floats = NDArray[np.float32]

_PIECE = 1 << 22  # entries that are added up at a time, so that buffers stay small
_WORD = "local_group="
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # another one on each machine, and after each boot
_NOTHING = np.empty(0, np.uint8)


class MachineCommunicator(GroupCommunicator):
    """The ranks of one machine; its rank 0 is the delegate."""

    _sent_before = 0

    def start_step(self, step: int, *, after_change: bool) -> None:
        self.enter("agree" if after_change else "step", step)
        self._sent_before = self._sent

    @property
    def bytes_inside(self) -> int:
        """That this rank has sent to others of its machine, in the open step."""
        return self._sent - self._sent_before

    @property
    def _sent(self) -> int:
        return self.bytes_sent + (0 if self._devices is None else self._devices.bytes_sent)

    def add_up(self, values: Floats) -> None:
        """The delegate's `values` become the sum in rank order; those of others are spoiled."""
        if self.size > 1:
            for start in range(0, values.size, _PIECE):
                self._add_up(values[start : start + _PIECE])

    def hand_out(self, values: Floats) -> None:
        """Replaces `values` by those of the delegate."""
        self.broadcast(_bytes(values))

    def expect_alike(self, entries: int) -> None:
        """All ranks are here, with as many entries. So nobody waits on its device for one that is
        lost, where an error would come late and name nobody.
        """
        heard, _ = self.all_gather(np.array([entries], np.int64).view(np.uint8))
        self._check(heard.view(np.int64).tolist(), [entries] * self.size)

    def _add_up(self, values: Floats) -> None:
        """Every rank adds up its part of the entries, and sends the sums to the delegate."""
        parts = np.array_split(values, self.size)
        mine = parts[self.rank]
        received, counts = self.all_to_all(_bytes(values), [part.nbytes for part in parts])
        self._check(counts, [mine.nbytes] * self.size)
        terms = received.view(np.float32).reshape(self.size, -1)
        mine[:] = terms[0]
        for term in terms[1:]:
            mine += term
        if self.rank == 0:  # the delegate has its own in place
            received, counts = self.all_to_all(_NOTHING, [0] * self.size)
            self._check(counts, [0, *(part.nbytes for part in parts[1:])])
            values[mine.size :] = received.view(np.float32)
        else:
            self.all_to_all(_bytes(mine), [mine.nbytes, *[0] * (self.size - 1)])

    def _check(self, counts: list[int], expected: list[int]) -> None:
        if counts != expected:
            raise WireError(f"{self.title}: the ranks of the machine differ in their buckets")


class Levels(GroupCommunicator):
    """Everyone, and what this rank has of the two levels. Making one is collective."""

    def __init__(self, group: dist.ProcessGroup, local_group: object, timeout: timedelta) -> None:
        self._parts: list[GroupCommunicator] = []
        super().__init__(group, timeout)
        try:
            machines = _machines(self.ask(_WORD + _describe(local_group, group)))
            self.ledger = next(i for i, ranks in enumerate(machines) if self.rank in ranks)
            self.ledgers = len(machines)
            if local_group == "host" and self.ledgers == 1 < self.size:
                _warn_of_one_machine(self.size)
            ranks = self.ranks_inside = machines[self.ledger]
            name = f"{group.group_name}/machine {ranks}"
            title = f"{self.title}, inside machine {self.ledger}"
            place = ranks.index(self.rank)
            self.inside = MachineCommunicator(Circle(name, ranks, place, title, self), timeout)
            self._parts.append(self.inside)
            self.between: GroupCommunicator | None = None  # only a delegate has it
            if place == 0:
                delegates = [ranks[0] for ranks in machines]
                name, title = f"{group.group_name}/between {machines}", f"{self.title}, between"
                circle = Circle(name, delegates, self.ledger, f"{title} machines", self)
                self.between = GroupCommunicator(circle, timeout)
                self._parts.append(self.between)
                self.inside.beside, self.between.beside = [self.between], [self.inside]
        except BaseException as error:
            self.close(f"attach: {error}")
            raise
        self.title += f", machine {self.ledger} of {self.ledgers}"
        self.all_hear = False  # steps are made in parts
        self.set_names(self.title, range(self.size), self.all_hear)

    def find_device_backend(self, group: object, device: torch.device | None) -> None:
        super().find_device_backend(group, device)
        for part in self._parts:
            part._device_backend = self._device_backend

    def adder(self) -> Callable[[], DeviceGroup] | None:
        return None if self.between is None else self.between.adder()

    def concur(self, word: str) -> None:
        """By way of both levels, where ranks that are in a step wait: so they are noticed."""
        for part in (*self._parts, *self._parts[:1]):
            part.all_gather(_NOTHING)
        super().concur(word)

    def enter(self, call: str, step: int = 0) -> None:
        for part in self._parts:
            part.enter(call, step)
        super().enter(call, step)

    def wake(self) -> None:
        for part in self._parts:
            part.wake()
        super().wake()

    def trim(self) -> None:
        for part in self._parts:
            part.trim()
        super().trim()

    def close(self, word: str = "") -> None:
        for part in self._parts:
            part.close(word)
        super().close(word)

    def interrupt(self, why: str) -> None:
        for part in self._parts:
            part.interrupt(why)
        super().interrupt(why)

    def end_threads(self) -> None:
        for part in self._parts:
            part.end_threads()
        super().end_threads()


def _describe(local_group: object, group: dist.ProcessGroup) -> str:
    """This rank's machine: its ranks, or its name; or what is wrong with `local_group`."""
    if local_group == "host":
        return f"host {_this_machine()}"
    assert isinstance(local_group, dist.ProcessGroup)  # attach() has looked
    everyone = dist.get_process_group_ranks(group)
    mine = dist.get_process_group_ranks(local_group)
    if not set(mine) <= set(everyone):
        return f"no group; its ranks {mine} are not all in the model's process group {everyone}"
    return str(sorted(everyone.index(rank) for rank in mine))


def _this_machine() -> str:
    """Its name and its boot: machines that were cloned have one name."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else "unknown"
    return f"{socket.gethostname()}, boot {boot}"


def _warn_of_one_machine(ranks: int) -> None:
    warnings.warn(
        f"local_group='host' found one machine, {_this_machine()}, for all {ranks} ranks: every "
        "step is dense, nothing is compressed. If they are on several machines, give each rank the "
        "process group of its own machine instead",
        RuntimeWarning,
        stacklevel=4,
    )


def _machines(words: list[str]) -> list[list[int]]:
    """The ranks of each machine, in the order of their delegates; ValueError if it cannot be."""
    machines: dict[str, list[int]] = {}
    for rank, word in enumerate(words):
        machines.setdefault(word, []).append(rank)
    for word, ranks in machines.items():
        machine = word.removeprefix(_WORD)
        if machine == word or not (machine.startswith("host ") or machine == str(ranks)):
            by_rank = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(words))
            raise ValueError(f"local_group must put every rank into one machine: {by_rank}")
    return list(machines.values())


def _bytes(values: Floats) -> NDArray[np.uint8]:
    return values.view(np.uint8)
