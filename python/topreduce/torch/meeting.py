"""Where ranks meet before they are connected, and leave words for each other: DDP's store.

A meeting is over once all ranks have come, or one has refused. So a rank that refuses before it
has a connection leaves nobody waiting:

    meetings of rank <r>                 how many this rank has been to; all ranks count alike
    meeting <n>/here                     how many have come
    meeting <n>/attempts                 how often all that had come left, since time ran out
    meeting <n>/outcome                  empty once all are here; or who refused, and why
    meeting <n>/refuser                  its number in the default group
    meeting <n>/elsewhere                there if the refusal was meant for another group

Who refuses because it has no group to speak of does so in the default one. Those that wait for it
in another group look there too, and all others pass over that meeting.
"""

import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from topreduce import CommError
from topreduce.torch.arrivals import Arrivals, explain

T = TypeVar("T")

_GLANCE = 0.05  # seconds between looks at the default group
STORE_PATIENCE = 2.0  # seconds; the machine that holds the store may be the one that died


class Group(Protocol):
    """A process group, or some of its ranks."""

    @property
    def group_name(self) -> str: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...


class Ranks:
    """Ranks that meet in a store, where torch.distributed has no process group of them."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """`store`: one that all of them reach, and nobody else uses for this. Ranks from 0."""
        if not 0 <= rank < size:
            raise ValueError(f"there is no rank {rank} of {size}")
        self.store, self.group_name = store, "ranks"
        self._rank, self._size = rank, size

    @classmethod
    def alone(cls) -> "Ranks":
        """One rank, that may join others by Sync.rebuild."""
        return cls(HashStore(), 0, 1)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def meet(group: Group, names: Sequence[int], timeout: timedelta) -> Store:
    """A place of their own for the ranks of `group`, once all have come; errors use the `names`.

    Not dist.new_group: that wants the whole world, or names groups by their ranks, so that the
    second one with the same ranks finds the addresses of the first.
    """
    title = getattr(group, "title", "") or f"rank {group.rank()} of {group.size()}"
    met, failure = attempt(lambda: _meet(group, names, timeout))
    while met is not None and met.refusal and met.place.check(["elsewhere"]):
        met, failure = attempt(lambda: _meet(group, names, timeout))
    if met is None:
        raise CommError(
            f"{title}: cannot reach the store of torch.distributed, where ranks meet: "
            f"{failure}. The rank that holds it may have died"
        )
    if met.absent is not None:
        raise CommError(
            f"{title}: not all ranks of the model's process group called attach(), or rebuild(), "
            f"within {timeout}" + (f" ({explain(met.absent)})" if met.absent else "")
        )
    if met.refusal:
        raise ValueError(refused([met.refusal]))
    return met.place


class _Met(NamedTuple):
    place: Store
    refusal: str = ""  # who refused, and why
    absent: Sequence[int] | None = None  # if time ran out: who had not come until then


def _meet(group: Group, names: Sequence[int], timeout: timedelta) -> _Met:
    rank, ranks = group.rank(), group.size()
    store, place = _next_place(group)
    # Who waited in vain may try again; until all have left it is one attempt.
    occasion = f"came, attempt {place.add('attempts', 0)}:"
    arrivals = Arrivals(place, rank, names, timeout, occasion)
    arrivals.check_in()
    if place.add("here", 1) == ranks:
        place.set("outcome", "")
    failure, refusal = _wait_for_outcome(group, place, timeout)
    if failure:
        absent = arrivals.absent(0)
        left = place.add("here", -1)
        if left == 0:
            place.add("attempts", 1)
        if left < ranks - 1:  # else the last one came just now
            return _Met(place, refusal) if refusal else _Met(place, absent=absent)
    store.add(_meetings(rank), 1)
    return _Met(place, legible(place.get("outcome")))


def _wait_for_outcome(group: Group, place: Store, timeout: timedelta) -> tuple[str, str]:
    """Why there is none, if so; and who of the group has refused in the default one, and why."""
    world = dist.group.WORLD
    if world is None or group is world or not isinstance(group, dist.ProcessGroup):
        return attempt(partial(place.wait, ["outcome"], timeout))[1], ""
    deadline = time.monotonic() + timeout.total_seconds()
    # Not by short waits: TCPStore warns on the terminal of each that ends without a result.
    while not place.check(["outcome"]):
        if refusal := _refused_elsewhere(group, world):
            return "refused", refusal
        if time.monotonic() > deadline:
            return "timed out", ""
        time.sleep(_GLANCE)
    return "", ""


def _refused_elsewhere(group: dist.ProcessGroup, world: dist.ProcessGroup) -> str:
    """What a rank of this group said in the default one; it is heard then."""
    store, place = _next_place(world)
    if not place.check(["refuser", "outcome"]):
        return ""
    if int(place.get("refuser")) not in dist.get_process_group_ranks(group):
        return ""
    place.set("elsewhere", "")
    store.add(_meetings(world.rank()), 1)
    return legible(place.get("outcome"))


def refuse(groups: Sequence[Group], error: Exception) -> None:
    """Tells the ranks that meet, or will, why this one does not; of the default group if none."""
    world = dist.group.WORLD if dist.is_initialized() else None

    def tell(group: Group) -> None:
        store, place = _next_place(group)
        names = getattr(group, "ranks", range(group.size()))  # a circle has names of its own
        word = f"rank {names[group.rank()]} {refusal_of(error)}"
        if world is not None:
            place.set("refuser", str(world.rank()))
        place.set("outcome", sendable(word))
        store.add(_meetings(group.rank()), 1)

    for group in groups or [each for each in [world] if each is not None]:
        if world is not None or isinstance(group, Ranks):
            with_patience(partial(tell, group))


def refusal_of(error: Exception) -> str:
    """What a rank says that does not take part, behind its name."""
    return f"refused: {type(error).__name__}: {error}"


def refused(refusals: Sequence[str]) -> str:
    """The same for the other ranks, each with its name."""
    return (
        f"nothing was changed, on any rank: {'; '.join(refusals)}. Correct that, then make the "
        "call again, on all ranks"
    )


def legible(words: bytes) -> str:
    """What a peer said, whatever its bytes are: fit for an error text, a log and a terminal."""
    text = words.decode(errors="backslashreplace")
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


def sendable(words: str) -> str:
    """Also if they hold what no encoding has, such as half of a pair from a file name."""
    return words.encode(errors="backslashreplace").decode()


def attempt(action: Callable[[], T]) -> tuple[T | None, str]:
    """The result, or what went wrong in words: an exception would keep the group alive."""
    try:
        return action(), ""
    except RuntimeError as error:
        # Gloo puts a file name before and advice after what happened.
        words = re.sub(r"^\[\S*\] | This is typically.*", "", str(error), flags=re.DOTALL)
        return None, words or type(error).__name__


def with_patience(action: Callable[[], T], seconds: float = STORE_PATIENCE) -> T | None:
    """The result, or None if it failed or takes too long: the store may have died as well."""
    results: list[T | None] = []
    thread = threading.Thread(target=lambda: results.append(attempt(action)[0]), daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _next_place(group: Group) -> tuple[Store, Store]:
    """The group's part of the store, and in it the place of this rank's next meeting."""
    whole = group.store if isinstance(group, Ranks) else _get_default_store()
    store = PrefixStore(f"topreduce/{group.group_name}", whole)
    number = store.add(_meetings(group.rank()), 0)
    return store, PrefixStore(f"meeting {number}", store)


def _meetings(rank: int) -> str:
    return f"meetings of rank {rank}"
