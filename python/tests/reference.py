"""A plain NumPy reading of every method, written from the papers and the documented rules.

It computes all ranks at once, has no buckets and no network, and is as slow as it likes. Arithmetic
is float32 where the library's is, so that results can be compared bit for bit.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from operator import add
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Places = NDArray[np.int64]
Shapes = Sequence[tuple[str, Sequence[int]]]


def size_of(shape: Sequence[int]) -> int:
    return math.prod(shape)


# ---- random numbers: Philox4x32-10 (Salmon et al. 2011), a block per (seed, step, purpose, i) ---

_WORD = 0xFFFFFFFF


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


PLACES, CAPS, SKETCH, ROWS, SAMPLE = 1, 2, 3, 4, 5  # purposes


def random_block(seed: int, step: int, purpose: int, i: int) -> tuple[int, int, int, int]:
    return philox((i, purpose, step & _WORD, step >> 32), (seed & _WORD, seed >> 32))


def random_bits(seed: int, step: int, purpose: int, i: int) -> int:
    """64 bits: the first two words of the block."""
    first, second, _, _ = random_block(seed, step, purpose, i)
    return second << 32 | first


def random_below(bound: int, seed: int, step: int, purpose: int, i: int) -> int:
    """The upper 32 bits, scaled to [0, bound)."""
    return (random_bits(seed, step, purpose, i) >> 32) * bound >> 32


def random_unit(seed: int, step: int, purpose: int, i: int) -> float:
    """The upper 53 bits as a fraction."""
    return (random_bits(seed, step, purpose, i) >> 11) / 2.0**53


def random_normal(seed: int, step: int, purpose: int, i: int) -> float:
    """Eight 16-bit numbers added up, standardised, corrected once after Cornish and Fisher."""
    block = random_block(seed, step, purpose, i)
    x = (sum((word & 0xFFFF) + (word >> 16) for word in block) - 4 * 65535.0) * (1 / 53509.91992145)
    return x + 1.2 / 8 / 24 * ((x * x - 3) * x)


# ---- the budget ---------------------------------------------------------------------------------


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


# ---- select: each rank alone --------------------------------------------------------------------


def strongest(values: Floats, k: int, floor: float = 0.0) -> Places:
    """The k of largest magnitude, but no zeros and none below `floor`; ties to the lower index."""
    magnitude = np.abs(values)
    candidates = np.flatnonzero((magnitude > 0) & (magnitude >= np.float32(floor)))
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


# ---- exchange: add up over the ranks ------------------------------------------------------------


@dataclass
class Delivery:
    total: Floats  # over the ranks; zero where nothing was delivered
    settled: list[Floats]  # per rank: what it no longer owes
    delivered: int
    whole: bool = False  # everything went, whatever it was


def in_rank_order(parts: Sequence[Floats]) -> Floats:
    return reduce(add, parts)


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


@dataclass
class Rows:
    """One tensor of ARC-Top-K."""

    start: int  # in the model
    size: int
    width: int
    count: int  # none: it goes whole
    first_direction: int
    first_draw: int


def arc_rows(
    shapes: Sequence[Sequence[int]], sketch: int = 4, width: int = 0, **_: Any
) -> list[Rows]:
    """Rows along the first dimension, or of `width` entries; none where sketching gains nothing."""
    tensors: list[Rows] = []
    start = directions = draws = 0
    for shape in shapes:
        size = size_of(shape)
        wide = count = 0
        if len(shape) > 1 and size:
            wide = min(width, size) or size // shape[0]
            count = -(-size // wide)
            if count * sketch >= size:
                wide = count = 0
        tensors.append(Rows(start, size, wide, count, directions, draws))
        start, directions, draws = start + size, directions + wide * sketch, draws + count + 1
    return tensors


def arc_sketch(rows: Floats, directions: Floats) -> Floats:
    """rows @ directions.T in float32: 16 partial sums, then halves onto halves."""
    columns = []
    for direction in directions:
        partial = np.zeros((len(rows), 16), np.float32)
        for at in range(0, rows.shape[1], 16):
            partial += rows[:, at : at + 16] * direction[at : at + 16]
        while partial.shape[1] > 1:
            left, right = np.hsplit(partial, 2)
            partial = left + right
        columns.append(partial[:, 0])
    return np.stack(columns, axis=1)


def arc_topk(pending: list[Floats], chosen: list[Places], step: Step) -> Delivery:
    """Rows that are largest in the mean, seen through a shared random sketch (2510.26709)."""
    options: dict[str, Any] = {"sketch": 4, "stream": "gaussian", "ranked": "tensor", "random": 0.0}
    options.update(step.of_exchange)
    travel = ROUNDED[without_scales(step.values)]
    tensors = arc_rows(step.shapes, **step.of_exchange)
    groups: list[tuple[int, list[tuple[float, int, int]]]] = []  # first draw; score, start, size
    places = []
    for tensor in tensors:
        whole = np.arange(tensor.start, tensor.start + tensor.size)
        if tensor.count == 0:
            places.append(whole)
            continue
        padded = -(-tensor.width // 16) * 16
        directions = np.zeros((options["sketch"], padded), np.float32)
        for i in range(options["sketch"] * tensor.width):
            directions[divmod(i, tensor.width)] = arc_direction(
                step, options["stream"], tensor.first_direction + i
            )
        sketches = []
        for values in pending:
            flat = np.zeros(tensor.count * tensor.width, np.float32)
            flat[: tensor.size] = values[whole]
            rows = np.zeros((tensor.count, padded), np.float32)
            rows[:, : tensor.width] = flat.reshape(tensor.count, tensor.width)
            sketches.append(travel(arc_sketch(rows, directions)))
        total = travel(in_rank_order(sketches)).astype(np.float64)
        scored = []
        for j, row in enumerate(total):
            at = j * tensor.width
            size = min(tensor.width, tensor.size - at)
            scored.append((reduce(add, row * row, 0.0) / size, tensor.start + at, size))
        groups.append((tensor.first_draw, scored))
    if options["ranked"] == "model":
        groups = [(0, [row for _, scored in groups for row in scored])]
    for first_draw, scored in groups:
        for start, size in arc_choice(scored, first_draw, options["random"], step):
            places.append(np.arange(start, start + size))
    return everywhere(pending, np.sort(np.concatenate([np.empty(0, np.int64), *places])), step)


def arc_direction(step: Step, stream: str, i: int) -> float:
    if stream == "gaussian":
        return random_normal(step.seed, step.number, SKETCH, i)
    bits = random_bits(step.seed, step.number, SKETCH, i // 64)
    return 1.0 if bits >> i % 64 & 1 else -1.0


def arc_choice(
    rows: list[tuple[float, int, int]], first_draw: int, random: float, step: Step
) -> list[tuple[int, int]]:
    """Best rows until they hold the density; then some of them exchanged for random ones."""
    order = [row[1:] for row in sorted(rows, key=lambda row: (-row[0], row[1]))]
    wanted = step.density * sum(size for _, size in order) * (1 - 1e-12)
    count = 0
    while count < len(order) and sum(size for _, size in order[:count]) < wanted:
        count += 1
    if random > 0 and order:
        count -= int(random * count + random_unit(step.seed, step.number, ROWS, first_draw))
        while count < len(order) and sum(size for _, size in order[:count]) < wanted:
            left, i = len(order) - count, first_draw + 1 + count
            other = count + random_below(left, step.seed, step.number, ROWS, i)
            order[count], order[other] = order[other], order[count]
            count += 1
    return order[:count]


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


def kth(values: Floats, k: int) -> float:
    return float(np.sort(np.abs(values))[-k])


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


# ---- values on the wire -------------------------------------------------------------------------


def as_bf16(values: Floats) -> Floats:
    """The upper 16 bits, rounded to nearest, ties to even."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def as_fp16(values: Floats) -> Floats:
    """What is too large becomes the largest."""
    return np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32)


BITS = {"int8": 8, "int4": 4, "int2": 2, "sign": 1}  # of a code; 64 values share a scale
LARGEST_SCALE = {
    "int8": float.fromhex("0x1.fep120"),
    "int4": float.fromhex("0x1.fep124"),
    "int2": float.fromhex("0x1.fep126"),
    "sign": float.fromhex("0x1.fep127"),
}


def block_mean(magnitudes: Floats) -> np.float32:
    """Sums over every eighth of 64, then halves onto halves; a 64th each."""
    padded = np.zeros(64, np.float32)
    padded[: magnitudes.size] = magnitudes
    sums = reduce(add, (padded * np.float32(2**-6)).reshape(8, 8), np.zeros(8, np.float32))
    while sums.size > 1:
        sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
    return np.float32(sums[0] * (np.float32(64) / np.float32(magnitudes.size)))


def rounded_block(values: str, block: Floats) -> Floats:
    """Up to 64 values as whole multiples of a scale with 8 significant bits."""
    magnitudes = np.abs(block)
    largest = magnitudes.max()

    def scale_of(wanted: np.float32) -> np.float32:
        return as_bf16(np.array([min(wanted, np.float32(LARGEST_SCALE[values]))]))[0]

    def nearest(scale: np.float32, most: int) -> Floats:
        if scale == 0:
            return np.zeros_like(block)
        return np.rint(np.minimum(magnitudes / scale, np.float32(most)))

    if values in ("int8", "int4"):
        most = 2 ** (BITS[values] - 1) - 1
        scale = scale_of(largest / np.float32(most))
        codes = nearest(scale, most)
    else:
        mean = min(block_mean(magnitudes), largest)
        scale = scale_of(mean if values == "sign" else np.float32(0.875) * mean)
        codes = np.ones_like(block)
        if values == "int2" and scale > 0 and magnitudes.min() >= scale / 2:
            codes = np.where(magnitudes > np.float32(1.5) * scale, np.float32(2), np.float32(1))
        elif values == "int2":
            scale = scale_of(np.float32(1.5) * min(mean, np.float32(2.0**126)))
            codes = nearest(scale, 1)
    return np.where(np.signbit(block), -1, 1).astype(np.float32) * codes * scale + np.float32(0)


def rounded_run(values: str, run: Floats) -> Floats:
    """The values of one piece."""
    if values in ROUNDED:
        return ROUNDED[values](run)
    blocks = [rounded_block(values, run[at : at + 64]) for at in range(0, run.size, 64)]
    return np.concatenate([*blocks, np.empty(0, np.float32)])


def run_bytes(values: str, count: int) -> int:
    if values in ROUNDED:
        return count * (4 if values == "fp32" else 2)
    full, rest = divmod(count, 64)
    return full * (2 + 8 * BITS[values]) + (2 + -(-BITS[values] * rest // 8) if rest else 0)


ROUNDED: dict[str, Callable[[Floats], Floats]] = {
    "fp32": lambda values: values,
    "bf16": as_bf16,
    "fp16": as_fp16,
}
VALUES = {*ROUNDED, *BITS}


def without_scales(values: str) -> str:
    """For what no parameter places, or nobody remembers the rounding of."""
    return values if values in ROUNDED else "bf16"


Pieces = Sequence[tuple[int, int]]


def parameters(sizes: Sequence[int]) -> Pieces:
    return [(start, start + size) for start, size in zip(starts(sizes), sizes, strict=True)]


def union(places: Iterable[Places]) -> Places:
    return np.unique(np.concatenate([np.empty(0, np.int64), *places]))


def journey(values: str, vector: Floats, places: Places, pieces: Pieces) -> tuple[Floats, Places]:
    """Entries of a vector as receivers read them: zero everywhere else; and where they are.

    A piece is filled up with zeros if that is smaller; then zeros do not arrive.
    """
    read = np.zeros_like(vector)
    there = []
    for begin, end in pieces:
        size, mine = end - begin, places[(places >= begin) & (places < end)]
        listed = 8 * run_bytes(values, mine.size) + size + mine.size // 32
        filled = 8 * run_bytes(values, size) <= listed and values != "sign"
        if filled and mine.size < size:
            spread_out = np.zeros_like(vector)
            spread_out[mine] = vector[mine]
            read[begin:end] = rounded_run(values, spread_out[begin:end])
            mine = mine[read[mine] != 0]
        else:
            read[mine] = rounded_run(values, vector[mine])
        there.append(mine)
    return read, union(there)


def known_places(values: str, vector: Floats, places: Places, pieces: Pieces) -> Floats:
    """The same where both sides know the places."""
    read = np.zeros_like(vector)
    for begin, end in pieces:
        mine = places[(places >= begin) & (places < end)]
        read[mine] = rounded_run(values, vector[mine])
    return read


# ---- feedback: what is owed after a step --------------------------------------------------------


class NoMemory:
    """Of all ranks. `plain`: everything is sent, and a memory that is an estimate starts anew."""

    estimates = False
    started = True
    remembers = False
    masks = True  # what was sent does not drift

    def __init__(self, ranks: int, n: int, together: bool, **_: float) -> None:
        self.together = together
        self.zeros = [np.zeros(n, np.float32) for _ in range(ranks)]

    @property
    def owed(self) -> list[Floats]:
        return self.zeros

    def change(self, gradient: list[Floats], loss_scale: float, plain: bool) -> list[Floats]:
        """What the gradients add to what is pending."""
        return [np.float32(1 / loss_scale) * mine for mine in gradient]

    def pending(self, gradient: list[Floats], loss_scale: float, plain: bool) -> list[Floats]:
        return self.change(gradient, loss_scale, plain)

    def drift(self, rank: int) -> Floats | None:
        """What it gains by itself until the next step; None if nothing."""
        return None

    def commit(self, pending: list[Floats], delivery: Delivery, plain: bool) -> Floats:
        """Returns the mean that everyone applies."""
        return delivery.total / np.float32(len(pending))


class Residual(NoMemory):
    remembers = True

    def __init__(self, ranks: int, n: int, together: bool, **_: float) -> None:
        super().__init__(ranks, n, together)
        self.debts = self.zeros

    @property
    def owed(self) -> list[Floats]:
        return self.debts

    def pending(self, gradient: list[Floats], loss_scale: float, plain: bool) -> list[Floats]:
        scaled = super().pending(gradient, loss_scale, plain)
        return [debt + mine for debt, mine in zip(self.debts, scaled, strict=True)]

    def commit(self, pending: list[Floats], delivery: Delivery, plain: bool) -> Floats:
        self.debts = [had - gone for had, gone in zip(pending, delivery.settled, strict=True)]
        return super().commit(pending, delivery, plain)


class EF21(NoMemory):
    """2106.05203. With a support shared by all ranks, the mean stands for every own estimate."""

    estimates = True
    remembers = True  # what is not sent is part of the next difference

    def __init__(self, ranks: int, n: int, together: bool, **_: float) -> None:
        super().__init__(ranks, n, together)
        self.started = n == 0
        self.estimate, self.mean = self.zeros, np.zeros(n, np.float32)

    def pending(self, gradient: list[Floats], loss_scale: float, plain: bool) -> list[Floats]:
        scaled = super().pending(gradient, loss_scale, plain)
        own = self.zeros if plain else self.estimate
        return [mine - estimate for mine, estimate in zip(scaled, own, strict=True)]

    def commit(self, pending: list[Floats], delivery: Delivery, plain: bool) -> Floats:
        if plain:
            self.estimate, self.mean = self.zeros, self.zeros[0]
        self.started = True
        self.mean = self.mean + super().commit(pending, delivery, plain)
        self.estimate = [
            self.mean if self.together else mine + settled
            for mine, settled in zip(self.estimate, delivery.settled, strict=True)
        ]
        return self.mean


class EF21M(EF21):
    """2305.15155. h, the running mean, is what was to be sent plus the estimate."""

    def __init__(self, ranks: int, n: int, together: bool, eta: float = 0.1) -> None:
        super().__init__(ranks, n, together)
        self.eta = np.float32(eta)
        self.base = self.zeros  # (1 - eta) h - estimate

    def change(self, gradient: list[Floats], loss_scale: float, plain: bool) -> list[Floats]:
        scale = (np.float32(1) if plain else self.eta) / np.float32(loss_scale)
        return [scale * mine for mine in gradient]

    def pending(self, gradient: list[Floats], loss_scale: float, plain: bool) -> list[Floats]:
        bases = self.zeros if plain else self.base
        changes = self.change(gradient, loss_scale, plain)
        return [base + mine for base, mine in zip(bases, changes, strict=True)]

    def commit(self, pending: list[Floats], delivery: Delivery, plain: bool) -> Floats:
        before = self.zeros if plain else self.estimate
        h = [had + estimate for had, estimate in zip(pending, before, strict=True)]
        mean = super().commit(pending, delivery, plain)
        keep = np.float32(1) - self.eta
        self.base = [keep * mine - own for mine, own in zip(h, self.estimate, strict=True)]
        return mean


class Momentum(Residual):
    """1712.01887: what piles up is the velocity of SGD with momentum."""

    def __init__(
        self,
        ranks: int,
        n: int,
        together: bool,
        momentum: float = 0.9,
        form: str = "plain",
        masking: str = "on",
    ) -> None:
        super().__init__(ranks, n, together)
        self.momentum = np.float32(momentum)
        plain = form == "plain"
        self.scale = np.float32(1) if plain else 1 + self.momentum
        self.push = np.float32(1) if plain else self.momentum / (1 + self.momentum)
        self.masks = masking == "on"
        self.velocity = self.zeros

    def change(self, gradient: list[Floats], loss_scale: float, plain: bool) -> list[Floats]:
        scale = self.scale / np.float32(loss_scale)
        self.changes = [scale * mine for mine in gradient]
        return self.changes

    def drift(self, rank: int) -> Floats:
        change = self.changes[rank]
        speed = self.momentum * self.velocity[rank] + self.push * change
        return self.momentum * speed

    def commit(self, pending: list[Floats], delivery: Delivery, plain: bool) -> Floats:
        self.velocity = [
            self.momentum * speed + self.push * change
            for speed, change in zip(self.velocity, self.changes, strict=True)
        ]
        mean = super().commit(pending, delivery, plain)
        if self.masks and not delivery.whole:
            for speed, settled in zip(self.velocity, delivery.settled, strict=True):
                speed[settled != 0] = 0
        self.debts = [
            unsent + self.momentum * speed
            for unsent, speed in zip(self.debts, self.velocity, strict=True)
        ]
        return mean


FEEDBACK: dict[str, Callable[..., NoMemory]] = {
    "none": NoMemory,
    "residual": Residual,
    "ef21": EF21,
    "ef21m": EF21M,
    "momentum": Momentum,
}

SELECT: dict[str, Callable[..., TopK | Foresight | Reused]] = {
    "topk": TopK,
    "carried": Carried,
    "reused": Reused,
    "gaussiank": GaussianK,
    "dgc": SampledTopK,
    "redsync": RedSync,
}

EXCHANGE: dict[str, Callable[[list[Floats], list[Places], Step], Delivery]] = {
    "dense": dense,
    "gather": gather,
    "randk": randk,
    "arc_topk": arc_topk,
    "topk_dsa": topk_dsa,
    "gtopk": gtopk,
    "ok_topk": OkTopk([]),  # keeps a state: `simulate` makes its own
}
TOGETHER = {"dense", "randk", "arc_topk"}  # all ranks always send the same entries

# method: feedback, select with granularity model and bucket, exchange
METHODS = {
    "dense": ("none", {"model": "", "bucket": ""}, "dense"),
    "topk": ("residual", {"model": "topk", "bucket": "carried"}, "gather"),
    "randk": ("residual", {"model": "", "bucket": ""}, "randk"),
    "arc_topk": ("residual", {"model": "", "bucket": ""}, "arc_topk"),
    "arc_topk_ef21m": ("ef21m", {"model": "", "bucket": ""}, "arc_topk"),
    "topk_dsa": ("residual", {"model": "topk", "bucket": "carried"}, "topk_dsa"),
    "gtopk": ("residual", {"model": "topk", "bucket": "carried"}, "gtopk"),
    "ok_topk": ("residual", {"model": "reused", "bucket": "reused"}, "ok_topk"),
    "gaussiank": ("residual", {"model": "gaussiank", "bucket": "gaussiank"}, "gather"),
    "dgc": ("momentum", {"model": "dgc", "bucket": "dgc"}, "gather"),
    "redsync": ("residual", {"model": "redsync", "bucket": "redsync"}, "gather"),
}

# ---- the step -----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """One step, flat over the layout."""

    mean: Floats
    owed: list[Floats]  # per rank
    density: float
    budget: int
    selected: list[int]  # per rank
    delivered: int


def starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def is_kept_dense(name: str, patterns: str) -> bool:
    """`*` stands for any letters."""
    words = (".*".join(map(re.escape, word.split("*"))) for word in patterns.split())
    return any(re.fullmatch(word, name) for word in words)


def kept_dense(shapes: Shapes, patterns: str) -> NDArray[np.bool_]:
    """Which entries belong to parameters that are sent whole."""
    kept = [is_kept_dense(name, patterns) for name, _ in shapes]
    return np.repeat(np.array(kept, np.bool_), [size_of(shape) for _, shape in shapes])


def simulate(
    method: str,
    shapes: Shapes,
    gradients: Sequence[Sequence[Floats]],
    *,
    density: float = 0.01,
    granularity: str = "bucket",
    values: str = "fp32",
    feedback: str = "",
    select: str = "",
    keep_dense: str = "",
    warmup_steps: int = 0,
    ramp_steps: int = 0,
    seed: int = 0,
    loss_scale: float = 1.0,
    of_feedback: dict[str, Any] | None = None,
    of_exchange: dict[str, Any] | None = None,
    **of_stages: Any,
) -> list[Outcome]:
    """Every step of a run: gradients[step][rank], flat over the layout."""
    feedback = feedback or METHODS[method][0]
    select = select or METHODS[method][1][granularity]
    exchange = METHODS[method][2]
    ranks = len(gradients[0])
    kept = kept_dense(shapes, keep_dense)
    sizes = [size_of(shape) for name, shape in shapes if not is_kept_dense(name, keep_dense)]
    n = sum(sizes)
    selectors = [
        SELECT[select](sizes, **accepted(SELECT[select], of_stages)) for _ in range(ranks) if select
    ]
    ok_topk = OkTopk(sizes, **accepted(OkTopk, of_stages))
    unremembered = "fp32" if values == "auto" else without_scales(values)
    if values == "auto":
        values = "int4" if density < 1 and method != "dense" and feedback != "none" else "fp32"
    given = values
    if ranks == 1:  # nothing travels
        values = unremembered = "fp32"
    memory = FEEDBACK[feedback](ranks, n, exchange in TOGETHER, **(of_feedback or {}))
    compressed = [shape for name, shape in shapes if not is_kept_dense(name, keep_dense)]
    of_exchange = of_exchange or {}
    sketched = sum(
        rows.count * of_exchange.get("sketch", 4) for rows in arc_rows(compressed, **of_exchange)
    )

    outcomes: list[Outcome] = []
    number = 0
    for scaled_gradient in gradients:
        gradient = [np.float32(1 / loss_scale) * mine for mine in scaled_gradient]
        share = 1.0 if method == "dense" else density_at(number, density, warmup_steps, ramp_steps)
        k = entries_for(share, n)
        whole = number < warmup_steps or not memory.started
        if not whole and number < warmup_steps + ramp_steps:
            # In the ramp, everything goes if that costs no more.
            sent = bits_sent(exchange, given, k, n, ranks, sketched, ok_topk.global_ratio)
            whole = sent >= bits_sent("dense", given, n, n, ranks)
        plain = whole and memory.estimates
        whole = whole or exchange == "dense" or n == 0
        step = Step(
            number,
            seed,
            n if whole else k,
            share,
            compressed,
            of_exchange,
            memory.remembers,
            values if memory.remembers else unremembered,
            sizes,
            granularity == "model",
        )

        mean = np.full(kept.size, np.nan, np.float32)
        chosen: list[Places] = []
        delivered = 0
        compressing = [mine[~kept] for mine in scaled_gradient]
        pending = memory.pending(compressing, loss_scale, plain)
        change = memory.change(compressing, loss_scale, plain)
        finite = all(np.isfinite(mine).all() for mine in [*pending, *gradient])
        if finite:
            if selectors and not whole:
                for r, selector in enumerate(selectors):
                    alone = replace(step, drift=memory.drift(r), sent_drift=not memory.masks)
                    chosen.append(selector.choose(pending[r], change[r], alone))
            keeps_state = exchange == "ok_topk" and not whole
            run = ok_topk if keeps_state else EXCHANGE["dense" if whole else exchange]
            delivery = run(pending, chosen, step)
            rest = replace(step, sizes=[int(kept.sum())], values=unremembered)
            kept_delivery = dense([mine[kept] for mine in gradient], [], rest)
            delivered = delivery.delivered + kept_delivery.delivered
            mean[kept] = kept_delivery.total / np.float32(ranks) * np.float32(loss_scale)
            # The commit. A step that is not finite changes nothing, not even its own number.
            mean[~kept] = memory.commit(pending, delivery, plain) * np.float32(loss_scale)
            if chosen:
                for selector in selectors:
                    selector.commit()
            if keeps_state:
                ok_topk.commit()
            number += 1
        selected = [places.size + int(kept.sum()) for places in chosen] or [delivered] * ranks
        outcomes.append(
            Outcome(
                mean=mean,
                owed=[spread(debt, ~kept) for debt in memory.owed],
                density=share,
                budget=step.k + int(kept.sum()),
                selected=selected,
                delivered=delivered,
            )
        )
    return outcomes


def accepted(stage: Callable[..., object], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a stage has; period, for one, is the selector's and the exchange's."""
    return {
        name: settings[name] for name in inspect.signature(stage).parameters if name in settings
    }


def spread(values: Floats, where: NDArray[np.bool_]) -> Floats:
    flat = np.zeros(where.size, np.float32)
    flat[where] = values
    return flat
