"""Each rank alone chooses entries."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from statistics import NormalDist
from typing import Any

import numpy as np

from reference.basics import Floats, Places, Step, kth, rounded, starts
from reference.random import CAPS, SAMPLE, random_below, random_unit


def strongest(values: Floats, k: int, floor: float = 0.0) -> Places:
    """The k of largest magnitude, but no zeros and none below `floor`; ties to the lower index."""
    magnitude = np.abs(values)
    candidates = np.flatnonzero((magnitude > 0) & (magnitude >= np.float32(floor)))
    if 0 < k < candidates.size:  # sorting fewer takes less time
        candidates = candidates[magnitude[candidates] >= kth(magnitude[candidates], k)]
    by_magnitude = np.argsort(-magnitude[candidates], kind="stable")
    return np.sort(candidates[by_magnitude[:k]])


@dataclass
class TopK:
    """Exact top-k over the model. Remembers nothing that could change the result."""

    sizes: Sequence[int]

    def choose(self, values: Floats, gradient: Floats, step: Step) -> Places:
        return strongest(values, step.k)

    def commit(self) -> None:
        pass


def caps_for(
    shares: Sequence[float], sizes: Sequence[int], known: bool, k: int, n: int, phase: float
) -> list[int]:
    """Three budgets: one entry each, by recent share, by size; rounded by one phase."""
    recent = reduce(add, shares, 0.0)  # sum() is more exact than plain addition
    by_share = 2.0 * k / recent if known and recent > 2.0**-20 else 0.0
    each = min(1.0, k / 2 / max(1, len(shares)))
    rest = (3.0 * k if known else k) - by_share * recent - each * max(1, len(shares))
    by_size = rest / max(1.0, n)
    caps, end = [], 0.001 + 0.998 * phase
    for share, size in zip(shares, sizes, strict=True):
        start, end = end, end + (each + by_share * share + by_size * size)
        caps.append(math.floor(end) - math.floor(start))
    return caps


@dataclass
class Foresight:
    """One threshold for the model, told from what the next step may hold; caps per parameter."""

    sizes: Sequence[int]
    threshold: float = 0.0
    last_k: float = 1.0
    shares: list[float] = field(default_factory=list)

    def choose(self, values: Floats, gradient: Floats, step: Step) -> Places:
        k = step.k
        self.shares = self.shares or [0.0] * len(self.sizes)
        cut = np.float32(self.threshold * math.pow(self.last_k / k, 0.3))
        phase = random_unit(step.seed, step.number, CAPS, 0)
        caps = caps_for(self.shares, self.sizes, bool(cut > 0), k, values.size, phase)
        if k >= values.size:  # everything may go
            cut = np.finfo(np.float32).smallest_subnormal
            caps = list(self.sizes)
        chosen = []
        left = values.copy() if step.remembers else np.zeros_like(values)
        drift = np.zeros_like(values) if step.drift is None else step.drift.copy()
        for start, size, cap in zip(starts(self.sizes), self.sizes, caps, strict=True):
            mine = values[start : start + size]
            places = strongest(mine, cap, cut)
            chosen.append(start + places)
            # Everything from the cut up counts as sent, even if the cap held it back. The first
            # step has no cut: there it is the weakest that was sent.
            sent_from = cut or np.abs(mine[places]).min(initial=np.inf)
            left[start : start + size][np.abs(mine) >= sent_from] = 0
            if not step.sent_drift:
                drift[start : start + size][np.abs(mine) >= sent_from] = 0
        # From every stride-th entry of the model, about 2^17 of them: what is left and drifts on,
        # plus or minus a gradient like this one by turns.
        if step.drift is not None:
            left = left + drift
        stride = max(1, left.size // 2**17) | 1
        sample, change = left[::stride], gradient[::stride].copy()
        change[1::2] *= -1
        sent = [places.size for places in chosen]
        threshold = self.learn(sample + change, stride, float(cut), sum(sent), step)
        shares = [(share + now) / 2 for share, now in zip(self.shares, sent, strict=True)]
        self.next = threshold, float(k), shares
        return np.concatenate([*chosen, np.empty(0, np.int64)])

    def learn(self, sample: Floats, stride: int, cut: float, count: int, step: Step) -> float:
        """The threshold that the next step will know, if this one is voted through."""
        raise NotImplementedError

    def commit(self) -> None:
        self.threshold, self.last_k, self.shares = self.next


@dataclass
class Carried(Foresight):
    """The k-th magnitude of what is foreseen, and a bias that follows the count."""

    gain: float = 0.02
    bias: float = 1.0

    def learn(self, sample: Floats, stride: int, cut: float, count: int, step: Step) -> float:
        k = step.k
        near = cut > 0 and k / 2 < count < k * 2
        self.next_bias = self.bias * math.pow(count / k, self.gain) if near else 1.0
        rank = max(1, rounded(k / stride))
        foreseen = kth(sample, rank) if rank <= sample.size else 0.0
        return foreseen * self.next_bias if foreseen > 0 else cut

    def commit(self) -> None:
        super().commit()
        self.bias = self.next_bias


@dataclass
class ByRule(Foresight):
    """A published rule: on this very step, or with buckets on what the next one may hold."""

    finish: str = "none"  # send all that is above the cut, "most": at most k, "exact": exactly k

    def cut(self, parts: list[Floats], k: float, step: Step) -> float:
        """The magnitude from which entries are sent."""
        raise NotImplementedError

    def choose(self, values: Floats, gradient: Floats, step: Step) -> Places:
        if not step.at_once:
            return super().choose(values, gradient, step)
        parts = [values[at : at + n] for at, n in zip(starts(self.sizes), self.sizes, strict=True)]
        return self.sent(parts, step.k, step)[0]

    def sent(self, parts: list[Floats], k: float, step: Step) -> tuple[Places, float]:
        """Which entries, and the magnitude from which that is."""
        values = np.concatenate([*parts, np.empty(0, np.float32)])
        if k >= values.size:
            return strongest(values, values.size), 0.0
        cut = max(self.cut(parts, k, step), float(np.finfo(np.float32).smallest_subnormal))
        if self.finish == "none":
            return strongest(values, values.size, cut), cut
        wanted = max(1, rounded(k))
        chosen = strongest(values, wanted, cut)
        if self.finish == "exact" and chosen.size < wanted:
            chosen = strongest(values, wanted)
        return chosen, float(np.abs(values[chosen]).min(initial=np.inf)) if chosen.size else 0.0

    def learn(self, sample: Floats, stride: int, cut: float, count: int, step: Step) -> float:
        found = 0.0 if step.k >= sum(self.sizes) else self.sent([sample], step.k / stride, step)[1]
        return found if found > 0 else cut

    def commit(self) -> None:
        if hasattr(self, "next"):
            super().commit()


def partial_sums(parts: list[Floats], power: Callable[[Any], Any]) -> float:
    """In float64: of each part 16 sums, then halves onto halves; then the parts."""
    total = 0.0
    for part in parts:
        rows = np.zeros((-(-part.size // 16), 16))
        rows.flat[: part.size] = power(part.astype(np.float64))
        sums = np.add.accumulate(rows)[-1] if len(rows) else np.zeros(16)
        while sums.size > 1:
            half = sums.size // 2
            sums = sums[:half] + sums[half:]
        total += float(sums[0])
    return total


def above(parts: list[Floats], t: float) -> int:
    return sum(int((np.abs(part) > np.float32(t)).sum()) for part in parts)


def just_above(t: float) -> float:
    return float(np.nextafter(np.float32(t), np.float32(np.inf)))


@dataclass
class GaussianK(ByRule):
    """Mean plus as many deviations as a normal distribution needs for k (arXiv 1911.08772)."""

    sides: str = "two"
    evaluations: int = 3

    def cut(self, parts: list[Floats], k: float, step: Step) -> float:
        n = sum(part.size for part in parts)
        total = partial_sums(parts, lambda x: x)
        mean = total / n
        variance = (partial_sums(parts, np.square) - total * mean) / max(1, n - 1)
        tails = 2 if self.sides == "two" else 1
        t = mean - NormalDist().inv_cdf(k / n / tails) * math.sqrt(max(0.0, variance))
        for evaluation in range(self.evaluations):
            count = above(parts, t)
            factor = 0.5 if count < 2 * k / 3 else 1.5 if count > 4 * k / 3 else 1.0
            if factor == 1.0 or evaluation + 1 == self.evaluations:
                break  # the last factor comes too late
            t *= factor
        return just_above(t)


@dataclass
class SampledTopK(ByRule):
    """The threshold of a sample, lowered until 0.8 k are above it (arXiv 1712.01887)."""

    finish: str = "most"
    sample: float = 0.01
    adaptations: int = 10

    def cut(self, parts: list[Floats], k: float, step: Step) -> float:
        values = np.concatenate(parts)
        n = values.size
        wanted = max(math.ceil(self.sample * n), math.ceil(2 * n / k))
        stride = max(1, n // wanted)
        stride -= stride % 2 == 0
        sample = values[random_below(stride, step.seed, step.number, SAMPLE, 0) :: stride]
        t = kth(sample, min(max(1, math.ceil(k / n * sample.size)), sample.size))
        for _ in range(self.adaptations):
            if (np.abs(values) >= np.float32(t)).sum() >= 0.8 * k:
                break
            t *= 0.8
        return float(np.float32(t))


@dataclass
class RedSync(ByRule):
    """A point on the line from the mean magnitude to the largest (arXiv 1808.04357)."""

    search: str = "binary"

    def cut(self, parts: list[Floats], k: float, step: Step) -> float:
        mean = partial_sums(parts, np.abs) / sum(part.size for part in parts)
        rise = max(float(np.abs(part).max(initial=0)) for part in parts) - mean
        low, high, t = 0.0, 1.0, 0.0
        if self.search == "trimmed":
            for ratio in (0.8, 0.6, 0.4, 0.2, 0.0):
                t = mean + ratio * rise
                if above(parts, t) >= k:
                    return just_above(t)
            return 0.0
        while high - low > 0.2:
            ratio = (low + high) / 2
            t = mean + ratio * rise
            count = above(parts, t)
            if k < count < 2 * k:
                break
            if count < k / 2:
                high = ratio
            else:
                low = ratio
        return just_above(t)


@dataclass
class Reused:
    """A threshold that is exact every `period` steps and reused between (arXiv 2201.07598)."""

    sizes: Sequence[int]
    period: int = 32
    low: float = 0.667
    high: float = 1.25
    factor: float = 1.012
    guard: float = 1.333
    guard_factor: float = 1.03
    guard_passes: int = 5
    threshold: float = 0.0
    last_k: float = 1.0
    due: bool = True
    shares: list[float] = field(default_factory=list)

    def choose(self, values: Floats, gradient: Floats, step: Step) -> Places:
        k, n = step.k, values.size
        self.shares = self.shares or [0.0] * len(self.sizes)
        cut = self.threshold * math.pow(self.last_k / k, 0.3)
        exact = self.due or step.number % self.period == 0
        shares = self.shares
        # The paper knows the exact k-th magnitude of this very step; with buckets, of the last one.
        if step.at_once and (exact or k >= n):
            chosen = strongest(values, k)
            found = np.abs(values[chosen])
        elif step.at_once:
            chosen, cut = self.guarded(values, cut, k)
        else:
            chosen, shares = self.capped(values, cut, step)
            found = np.sort(np.abs(values[strongest(values, k, cut / 2)]))
        self.next = self.threshold, self.last_k, self.due, shares
        if k >= n:
            return chosen
        if not exact:
            self.next = *self.steered(cut, k, chosen.size), shares
        elif found.size == k:
            self.next = float(found.min()), float(k), False, shares
        else:
            self.next = cut if step.at_once else cut / 2, float(k), True, shares
        return chosen

    def guarded(self, values: Floats, cut: float, k: int) -> tuple[Places, float]:
        """At most two budgets, and up to five times a higher threshold."""
        chosen = strongest(values, 2 * k, cut)
        magnitudes = np.abs(values[chosen])
        for _ in range(self.guard_passes):
            if (magnitudes >= np.float32(cut)).sum() <= self.guard * k:
                break
            cut *= self.guard_factor
        return chosen[magnitudes >= np.float32(cut)], cut

    def capped(self, values: Floats, cut: float, step: Step) -> tuple[Places, list[float]]:
        k, n = step.k, values.size
        phase = random_unit(step.seed, step.number, CAPS, 0)
        caps = caps_for(self.shares, self.sizes, cut > 0 or k >= n, k, n, phase)
        if k >= n:
            cut, caps = 0.0, list(self.sizes)
        chosen = []
        for start, size, cap in zip(starts(self.sizes), self.sizes, caps, strict=True):
            chosen.append(start + strongest(values[start : start + size], cap, cut))
        shares = [(share + now.size) / 2 for share, now in zip(self.shares, chosen, strict=True)]
        return np.concatenate([*chosen, np.empty(0, np.int64)]), shares

    def steered(self, cut: float, k: int, count: int) -> tuple[float, float, bool]:
        threshold = cut
        if count < self.low * k:
            threshold /= self.factor
        if count > self.high * k:
            threshold *= self.factor
        return threshold, float(k), count < k / 2 or count >= k * 2

    def commit(self) -> None:
        self.threshold, self.last_k, self.due, self.shares = self.next
