"""Where ranks meet before they are connected, and leave words for each other: DDP's store.

A meeting is over once all ranks have come, or one has refused. So a rank that refuses before it
has a connection leaves nobody waiting:

    meetings of rank <r>                 how many this rank has been to; all ranks count alike
    meeting <n>/here                     how many have come
    meeting <n>/attempts                 how often all that had come left, since time ran out
    meeting <n>/outcome                  empty once all are here; or who refused, and why
"""

import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from topreduce import CommError
from topreduce.torch.arrivals import Arrivals, explain

T = TypeVar("T")

STORE_PATIENCE = 2.0  # seconds; the machine that holds the store may be the one that died


class Group(Protocol):
    """A process group, or some of its ranks."""

    @property
    def group_name(self) -> str: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...


def meet(group: Group, names: Sequence[int], timeout: timedelta) -> Store:
    """A place of their own for the ranks of `group`, once all have come; errors use the `names`.

    Not dist.new_group: that wants the whole world, or names groups by their ranks, so that the
    second one with the same ranks finds the addresses of the first.
    """
    title = getattr(group, "title", "") or f"rank {group.rank()} of {group.size()}"
    met, failure = attempt(lambda: _meet(group, names, timeout))
    if met is None:
        raise CommError(
            f"{title}: attach() cannot reach the store of torch.distributed, where ranks meet: "
            f"{failure}. The rank that holds it may have died"
        )
    if met.absent is not None:
        raise CommError(
            f"{title}: not all ranks of the model's process group called attach() within {timeout}"
            + (f" ({explain(met.absent)})" if met.absent else "")
        )
    if met.refusal:
        raise ValueError(f"nothing was attached, on no rank: {met.refusal}")
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
    _, failure = attempt(lambda: place.wait(["outcome"], timeout))
    if failure:
        absent = arrivals.absent(0)
        left = place.add("here", -1)
        if left == 0:
            place.add("attempts", 1)
        if left < ranks - 1:  # else the last one came just now
            return _Met(place, absent=absent)
    store.add(_meetings(rank), 1)
    return _Met(place, legible(place.get("outcome")))


def refuse(groups: Sequence[Group], error: Exception) -> None:
    """Tells the ranks that meet, or will, why this one does not; of the default group if none."""
    if not dist.is_initialized():
        return
    world = dist.group.WORLD
    assert world is not None

    def tell(group: Group) -> None:
        store, place = _next_place(group)
        names = getattr(group, "ranks", range(group.size()))  # a circle has names of its own
        word = f"rank {names[group.rank()]}: {type(error).__name__}: {error}"
        place.set("outcome", sendable(word))
        store.add(_meetings(group.rank()), 1)

    for group in groups or [world]:
        with_patience(partial(tell, group))


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
    store = PrefixStore(f"topreduce/{group.group_name}", _get_default_store())
    number = store.add(_meetings(group.rank()), 0)
    return store, PrefixStore(f"meeting {number}", store)


def _meetings(rank: int) -> str:
    return f"meetings of rank {rank}"
