"""The strongest entries of a vector on a device.

The host must hear how many there are before it can ask for them, and nothing else.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WIDE = 2**31  # entries that 32 bits with a sign cannot count


class Above:
    """Entries of magnitude >= floor."""

    def __init__(
        self,
        x: Tensor,
        floor: float,
        limits: Sequence[int],
        sizes: Sequence[int],
        to_device: Callable[[NDArray[Any]], Tensor],
    ) -> None:
        """`limits`: how many are wanted of each part of x, whose sizes are given; or of all."""
        self._x, self._limits, self._sizes = x, limits, sizes
        dtype = torch.int32 if x.numel() < WIDE else torch.int64
        self._running = ((x >= floor) | (x <= -floor)).cumsum(0, dtype=dtype)
        ends = self._running[-1:]
        if len(limits) > 1:
            lasts = np.cumsum(sizes) - 1
            ends = self._running[to_device(lasts.clip(0))]
        self.counts = ends.to(torch.int32)  # up to the end of each part

    def strongest(self, counts: NDArray[np.int32]) -> Tensor:
        """Where they are, in order; ties to the lower index. `counts`: as the host heard them."""
        ends = counts.tolist()
        if len(self._limits) > 1:
            sizes = itertools.accumulate(self._sizes)
            ends = [count if end else 0 for count, end in zip(ends, sizes, strict=True)]
        found = [end - start for start, end in itertools.pairwise([0, *ends])]
        places = _first(self._running, sum(found))
        if any(count > limit for count, limit in zip(found, self._limits, strict=True)):
            parts = zip(torch.split(places, found), self._limits, strict=True)
            places = torch.cat([_cut(part, self._x, limit) for part, limit in parts])
        return places


def _first(running: Tensor, count: int) -> Tensor:
    """Where a running count grows for the first `count` times."""
    numbers = torch.arange(1, count + 1, dtype=running.dtype, device=running.device)
    return torch.searchsorted(running, numbers)


def _cut(places: Tensor, x: Tensor, limit: int) -> Tensor:
    """The `limit` strongest of `places` (ascending), ties to the lower one."""
    if places.numel() <= limit:
        return places
    if limit == 0:
        return places[:0]
    magnitudes = x[places].abs()
    weakest = magnitudes.topk(limit, sorted=False).values.min()
    stronger, ties = magnitudes > weakest, magnitudes == weakest
    wanted = limit - stronger.sum()
    kept = stronger | (ties & (ties.cumsum(0) <= wanted))
    return places[_first(kept.cumsum(0), limit)]
