"""States of a run for another number of ranks.

What everyone applies is a mean over the ranks, so the mean of what is owed must stay. Old ranks lie
side by side on a line, new ones on another of the same length; each new rank takes over what lies
under it, in proportion:

    old   |    0    |    1    |    2    |    3    |
    new   |       0      |      1      |      2     |       owed 0 = 3/4 owed 0 + 1/4 owed 1
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

from topreduce.torch.checkpoint import FORMAT, few
from topreduce.torch.fsdp import local_part


def reshard(
    states: Mapping[str, Any] | Iterable[Mapping[str, Any]], ranks: int
) -> list[dict[str, Any]]:
    """The `state_dict()`s of a run for `ranks` ranks, one each: the mean of what is owed is kept.

    `states`: those of all ranks that saved, in any order, or one that holds all of them. With the
    same number of ranks they come back as they were. ValueError, with what differs, if they are not
    the states of one step of one run.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, not {ranks}")
    common, by_rank = _sort(states)
    common["ranks"] = ranks
    parts = (
        blend([(share, by_rank[old]) for old, share in shares(len(by_rank), rank, ranks)])
        for rank in range(ranks)
    )
    return [
        {**common, **{f"rank{rank}/{key}": value for key, value in part.items()}}
        for rank, part in enumerate(parts)
    ]


def _sort(
    states: Mapping[str, Any] | Iterable[Mapping[str, Any]],
) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """What is the same on all ranks, and what each rank has of its own."""
    common: dict[str, Any] = {}
    own: dict[int, dict[str, Any]] = {}
    for state in [states] if isinstance(states, Mapping) else states:
        for key, value in state.items():
            rank, _, name = key.partition("/")
            if name and rank.startswith("rank") and rank[4:].isdecimal():
                before = own.setdefault(int(rank[4:]), {}).setdefault(name, value)
                if not _same(before, value):
                    raise ValueError(f"two states of {rank}, which differ in {name}")
            elif common.setdefault(key, value) != value:
                raise ValueError(f"states of different runs: {key} is {common[key]} and {value}")
    if common.get("format") != FORMAT:
        raise ValueError(f"not state_dict()s of topreduce: format is {common.get('format')}")
    missing = set(range(common["ranks"])) - own.keys()
    if missing:
        names = few(f"rank {rank}" for rank in missing)
        raise ValueError(f"saved by {common['ranks']} ranks; the state of {names} is missing")
    first = own[0]
    for rank, part in own.items():
        if part.keys() != first.keys():
            raise ValueError(f"rank {rank} differs from rank 0 in {few(part.keys() ^ first)}")
        for key in ("step", "bypassed"):
            if part[key] != first[key]:
                raise ValueError(f"{key} is {first[key]} on rank 0 and {part[key]} on rank {rank}")
        for key, value in part.items():
            if getattr(value, "shape", None) != getattr(first[key], "shape", None):
                raise ValueError(f"{key} has another shape on rank {rank} than on rank 0")
    return common, [own[rank] for rank in sorted(own)]


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(local_part(one), local_part(other))
    return bool(one == other)


def shares(old: int, rank: int, ranks: int) -> list[tuple[int, float]]:
    """Which of `old` ranks lie under a new one, and how much of each."""
    found = []
    for other in range(old):
        begin = max(Fraction(rank, ranks), Fraction(other, old))
        end = min(Fraction(rank + 1, ranks), Fraction(other + 1, old))
        if end > begin:
            found.append((other, float((end - begin) * ranks)))
    return found


def blend(parts: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
    """The sum of shares of states that have the same keys, key by key."""
    return {key: _weigh([(share, part[key]) for share, part in parts]) for key in parts[0][1]}


def _weigh(terms: list[tuple[float, Any]]) -> Any:
    """Their sum; what is the same everywhere, such as the step, stays as it is."""
    first = terms[0][1]
    if isinstance(first, torch.Tensor):
        if len(terms) == 1:
            return first.clone()
        total = torch.zeros_like(first, dtype=torch.float64)
        for share, value in terms:
            total += share * value.double()
        return total.to(first.dtype)
    if all(value == first for _, value in terms):
        return first
    return sum(share * value for share, value in terms)
