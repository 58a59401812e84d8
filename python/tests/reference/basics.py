"""The words that all stages use: entries, budget, what a step and an exchange give."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Places = NDArray[np.int64]
Shapes = Sequence[tuple[str, Sequence[int]]]


def size_of(shape: Sequence[int]) -> int:
    return math.prod(shape)


def density_at(step: int, density: float, warmup_steps: int, ramp_steps: int) -> float:
    """Everything while warming up, then down to `density` by the same factor in every step."""
    if step < warmup_steps:
        return 1.0
    into = step - warmup_steps
    return density if into >= ramp_steps else math.pow(density, (into + 1) / (ramp_steps + 1))


def rounded(x: float) -> int:
    """To the nearest, halves up."""
    whole, fraction = divmod(x, 1)
    return int(whole) + (fraction >= 0.5)


def entries_for(density: float, n: int) -> int:
    """Of n entries; at least one, if there is one."""
    return min(n, max(1, rounded(density * n)))


@dataclass
class Step:
    """What every stage may know."""

    number: int
    seed: int
    k: int  # entries to send
    density: float  # their share before rounding
    shapes: list[Sequence[int]]  # of the parameters that are compressed
    of_exchange: dict[str, Any]  # its settings
    remembers: bool  # what is not sent is owed
    values: str  # how they travel
    sizes: Sequence[int]  # of the parameters in question
    at_once: bool = False  # one exchange for the whole model
    drift: Floats | None = None  # what the memory of this rank will gain by itself
    sent_drift: bool = False  # what was sent, too


@dataclass
class Delivery:
    total: Floats  # over the ranks; zero where nothing was delivered
    settled: list[Floats]  # per rank: what it no longer owes
    delivered: int
    whole: bool = False  # everything went, whatever it was


def in_rank_order(parts: Sequence[Floats]) -> Floats:
    return reduce(add, parts)


def kth(values: Floats, k: int) -> float:
    return float(np.partition(np.abs(values), -k)[-k])


def starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]
