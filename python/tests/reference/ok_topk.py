"""The exchange ok_topk, which keeps thresholds and regions from step to step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from reference.basics import Delivery, Floats, Places, Step, kth, rounded, starts
from reference.exchange import (
    PARTS,
    equal_parts,
    from_owners,
    owe_rounding,
    owners,
    ranked,
    to_owners,
)


@dataclass
class OkTopk:
    """The strongest sums of what was chosen (arXiv 2201.07598)."""

    sizes: Sequence[int]
    tau: int = 64
    period: int = 32
    global_ratio: float = 1.0
    global_low: float = 0.667
    global_high: float = 1.15
    global_factor: float = 1.008
    threshold: float = 0.0
    last_k: float = 1.0
    due: bool = True
    bounds: list[list[int]] = field(default_factory=list)

    def __call__(self, pending: list[Floats], chosen: list[Places], step: Step) -> Delivery:
        n = pending[0].size
        k = min(n, max(1, rounded(self.global_ratio * step.k)))
        everything = k >= n
        cut = 0.0 if everything else self.threshold * math.pow(self.last_k / k, 0.3)
        exact = not everything and (self.due or step.number % self.period == 0)
        bounds = self.bounds or equal_parts(self.sizes)
        if not self.bounds or step.number % self.tau == 0:
            bounds = self.agreed(bounds, chosen)

        owner = owners(self.sizes, bounds, len(pending))
        sent, sums, places = to_owners(pending, chosen, owner, step)
        shown = places[np.abs(sums[places]) >= np.float32(0.75 * cut if exact else cut)]
        if exact and step.at_once:
            shown = ranked(sums, places, k)
        weakest = float(np.abs(sums[shown]).min()) if shown.size == k else 0.0
        seen, shown, change = from_owners(sums, shown, owner, step)
        kept = shown
        state = self.threshold, self.last_k, self.due
        if exact and step.at_once:
            state = weakest, float(k), False
        elif exact:
            kept = shown[np.abs(seen[shown]) >= np.float32(cut)]
            found = shown.size >= k
            state = kth(seen[shown], k) if found else cut / 2, float(k), not found
        elif not everything:
            state = self.steered(cut, k, seen[kept])
        self.next = *state, bounds

        total = np.zeros_like(sums)
        total[kept] = seen[kept]
        settled = [np.zeros_like(mine) for mine in sent]
        for mine, all_sent in zip(settled, sent, strict=True):
            mine[kept] = all_sent[kept]  # sent and delivered
        owe_rounding(settled, owner, change, kept)
        return Delivery(total, settled, kept.size)

    def agreed(self, before: list[list[int]], chosen: list[Places]) -> list[list[int]]:
        """The mean of all ranks' bounds, of those with PARTS entries or more there.

        They travel as shares of the parameter, in fp32, and are added up in rank order.
        """
        after = []
        for start, size, known in zip(starts(self.sizes), self.sizes, before, strict=True):
            sums, voices = np.zeros(PARTS - 1, np.float32), 0
            for places in chosen:
                mine = places[(places >= start) & (places < start + size)] - start
                if mine.size >= PARTS:
                    cuts = [int(mine[mine.size * i // PARTS]) for i in range(1, PARTS)]
                    sums += (np.array(cuts, np.float64) / size).astype(np.float32)
                    voices += 1
            means = sums.astype(np.float64) / max(1, voices) * size
            after.append([int(each) for each in np.floor(means)] if voices else known)
        return after

    def steered(self, cut: float, k: int, kept: Floats) -> tuple[float, float, bool]:
        count = kept.size
        if count > self.global_high * k:
            return kth(kept, k), float(k), False
        if count < self.global_low * k:
            return cut / self.global_factor, float(k), cut > 0 and count < k / 2
        return cut, float(k), False

    def commit(self) -> None:
        self.threshold, self.last_k, self.due, self.bounds = self.next
