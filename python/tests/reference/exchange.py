"""Entries are added up over the ranks."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from reference.basics import Delivery, Floats, Places, Step, in_rank_order, starts
from reference.random import PLACES, random_below
from reference.wire import journey, known_places, parameters, run_bytes, union


def gather(pending: list[Floats], chosen: list[Places], step: Step) -> Delivery:
    """Everyone's entries to everyone (TopkA in arXiv 2201.07598)."""
    read = [
        journey(step.values, values, places, parameters(step.sizes))
        for values, places in zip(pending, chosen, strict=True)
    ]
    settled = [values for values, _ in read]
    return Delivery(in_rank_order(settled), settled, union(places for _, places in read).size)


def everywhere(pending: list[Floats], places: Places, step: Step) -> Delivery:
    """The same places on every rank. Rank r adds up the r-th part of every parameter, rounds it for
    everyone, and owes what that changed."""
    ranks = len(pending)
    parts = [
        (start + size * r // ranks, start + size * (r + 1) // ranks)
        for start, size in zip(starts(step.sizes), step.sizes, strict=True)
        for r in range(ranks)
    ]
    settled = [known_places(step.values, values, places, parts) for values in pending]
    exact = in_rank_order(settled)
    total = known_places(step.values, exact, places, parts)
    for i, (begin, end) in enumerate(parts):
        settled[i % ranks][begin:end] += total[begin:end] - exact[begin:end]
    return Delivery(total, settled, places.size)


def dense(pending: list[Floats], chosen: list[Places], step: Step) -> Delivery:
    return replace(everywhere(pending, np.arange(pending[0].size), step), whole=True)


def randk(pending: list[Floats], chosen: list[Places], step: Step) -> Delivery:
    """One random entry from each of k stretches of the model, turned by a random offset."""
    n, k = pending[0].size, step.k

    def draw(bound: int, i: int) -> int:
        return random_below(bound, step.seed, step.number, PLACES, i)

    turn = draw(n, 0)
    bounds = [j * n // k for j in range(k + 1)]
    drawn = [bounds[j] + draw(bounds[j + 1] - bounds[j], j + 1) for j in range(k)]
    return everywhere(pending, np.sort((np.array(drawn, np.int64) - turn) % n), step)


PARTS = 16  # in which ranks tell each other where the entries of a parameter lie


def owners(sizes: Sequence[int], bounds: Sequence[Sequence[int]], ranks: int) -> Places:
    """Who adds up each entry: of every parameter one region per rank, each time one rank further.

    `bounds` cut a parameter into PARTS; between them the bounds of regions are interpolated.
    """
    of_entries = []
    for parameter, (size, inner) in enumerate(zip(sizes, bounds, strict=True)):
        cuts = [0, *inner, size, size]
        owner = np.zeros(size, np.int64)
        for r in range(ranks):
            whole, part = divmod(r * PARTS, ranks)
            begin = cuts[whole] + (cuts[whole + 1] - cuts[whole]) * part // ranks
            owner[begin:] = (r + parameter) % ranks
        of_entries.append(owner)
    return np.concatenate([*of_entries, np.empty(0, np.int64)])


def equal_parts(sizes: Sequence[int]) -> list[list[int]]:
    return [[size * i // PARTS for i in range(1, PARTS)] for size in sizes]


def regions(sizes: Sequence[int], owner: Places) -> list[tuple[int, int, int]]:
    """Begin, end and owner of every stretch of a parameter that has one owner."""
    found = []
    for start, size in zip(starts(sizes), sizes, strict=True):
        mine = owner[start : start + size]
        cuts = [0, *(np.flatnonzero(np.diff(mine)) + 1).tolist(), size]
        for begin, end in pairwise(cuts):
            if begin < end:
                found.append((start + begin, start + end, int(mine[begin])))
    return found


def to_owners(
    pending: list[Floats], chosen: list[Places], owner: Places, step: Step
) -> tuple[list[Floats], Floats, Places]:
    """What each rank sent, as owners read it, its sum and where; what an owner has stays home."""
    sent = [np.zeros_like(values) for values in pending]
    arrived = []
    for r, (mine, values, places) in enumerate(zip(sent, pending, chosen, strict=True)):
        own = places[owner[places] == r]
        pieces = [(begin, end) for begin, end, to in regions(step.sizes, owner) if to != r]
        read, there = journey(step.values, values, places[owner[places] != r], pieces)
        mine[there] = read[there]
        mine[own] = values[own]
        arrived.append(union([there, own]))
    return sent, in_rank_order(sent), union(arrived)


def from_owners(
    sums: Floats, places: Places, owner: Places, step: Step
) -> tuple[Floats, Places, Floats]:
    """The sums as everyone reads them, where they are, and what rounding changed."""
    pieces = [(begin, end) for begin, end, _ in regions(step.sizes, owner)]
    seen, there = journey(step.values, sums, places, pieces)
    change = np.zeros_like(sums)
    change[places] = seen[places] - sums[places]
    return seen, there, change


def owe_rounding(settled: list[Floats], owner: Places, change: Floats, places: Places) -> None:
    """The owner of an entry rounds its sum for everyone, and owes what that changed."""
    for r, mine in enumerate(settled):
        owned = places[owner[places] == r]
        mine[owned] += change[owned]


def topk_dsa(pending: list[Floats], chosen: list[Places], step: Step) -> Delivery:
    """The sum of all that was chosen, added up in regions of equal width (arXiv 1802.08021)."""
    owner = owners(step.sizes, equal_parts(step.sizes), len(pending))
    settled, exact, places = to_owners(pending, chosen, owner, step)
    total, there, change = from_owners(exact, places, owner, step)
    owe_rounding(settled, owner, change, places)
    return Delivery(total, settled, there.size)


def ranked(values: Floats, places: Places, k: int) -> Places:
    """The k of `places` with the largest magnitudes, zeros too; ties to the lower index."""
    order = np.argsort(-np.abs(values[places]), kind="stable")
    return np.sort(places[order[:k]])


def gtopk(pending: list[Floats], chosen: list[Places], step: Step) -> Delivery:
    """Up a binary tree, cut at every meeting (arXiv 1901.04359); but who cuts it owes it."""
    ranks = len(pending)
    settled = [np.zeros_like(values) for values in pending]
    for mine, values, places in zip(settled, pending, chosen, strict=True):
        mine[places] = values[places]
    sums = [mine.copy() for mine in settled]
    lists = list(chosen)

    def rounded_by(r: int) -> None:
        read, there = journey(step.values, sums[r], lists[r], parameters(step.sizes))
        settled[r] += read - sums[r]
        sums[r], lists[r] = read, there

    def meet(r: int, other: int) -> None:
        total = sums[r] + sums[other]
        both = np.union1d(lists[r], lists[other])
        if step.at_once:
            kept = ranked(total, both, step.k)
        else:  # of each parameter as many as the richer had
            kept_of = []
            for start, size in zip(starts(step.sizes), step.sizes, strict=True):
                mine, theirs, all_of = (
                    places[(places >= start) & (places < start + size)]
                    for places in (lists[r], lists[other], both)
                )
                kept_of.append(ranked(total, all_of, max(mine.size, theirs.size)))
            kept = np.concatenate([*kept_of, np.empty(0, np.int64)])
        cut = np.setdiff1d(both, kept)
        settled[r][cut] -= total[cut]
        total[cut] = 0
        sums[r], lists[r] = total, kept

    stride = 1
    while stride < ranks:
        for r in range(0, ranks - stride, 2 * stride):
            rounded_by(r + stride)
            meet(r, r + stride)
        stride *= 2
    rounded_by(0)
    return Delivery(sums[0], settled, lists[0].size)


def bits_sent(
    exchange: str,
    values: str,
    k: int,
    n: int,
    ranks: int,
    sketched: int = 0,
    global_ratio: float = 1.0,
) -> float:
    """By each rank, roughly."""
    split = k * (ranks - 1) / ranks
    value = 8 * run_bytes(values, 64) / 64
    entry = value + (1.0 if k >= n else 1.5 - math.log2(k / n))
    return {
        "topk_dsa": entry * (split + min(k * (ranks - 1), n * (ranks - 1) / ranks)),
        "gtopk": entry * k * (ranks - 1).bit_length(),
        "ok_topk": entry * (1 + global_ratio) * k * (ranks - 1) / ranks,
        "arc_topk": value * 2.0 * (sketched + k) * (ranks - 1) / ranks,
        "gather": entry * k * (ranks - 1),
        "randk": value * 2.0 * k * (ranks - 1) / ranks,
        "dense": value * 2.0 * n * (ranks - 1) / ranks,
    }[exchange]
