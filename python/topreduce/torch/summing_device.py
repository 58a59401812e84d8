"""Sums over the ranks by an all-reduce between their devices, which stay there: reduce=native.

topreduce/device.h says what each call must do.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from topreduce.torch.device import Floats, GradientDevice, Indices
from topreduce.torch.ranking import best_rows, digits_of


class Adder(Protocol):
    """The devices of all ranks."""

    def all_reduce(self, values: Tensor) -> None: ...


class _Sums(NamedTuple):
    """Over the ranks, of x at these places, or of all of it."""

    places: Tensor | None
    values: Tensor


class SummingDevice(GradientDevice):
    """Adds up over the ranks itself, if it is told how."""

    def __init__(self, device: torch.device) -> None:
        self._noted: list[Tensor] = []
        self._sums: dict[int, _Sums] = {}  # of the open step, by exchange
        self._largest: dict[int, float] = {}  # of these
        # Who adds up, once it is asked for; None: sums are made in main memory.
        self.adder: Callable[[], Adder] | None = None
        super().__init__(device)

    def release(self) -> None:
        self._sums.clear()
        self._largest.clear()
        super().release()

    def _close(self) -> None:
        self._noted.clear()
        super()._close()

    # ---- what the core asks for ----------------------------------------------------------------

    def adds_up(self) -> bool:
        return self.adder is not None

    def project(self, start: int, size: int, width: int, directions: Floats) -> None:
        to = self._to_device(directions).view(-1, width)
        rows, rest = divmod(size, width)
        end = start + rows * width
        self._noted.append(torch.mm(self._x[start:end].view(rows, width), to.t()).view(-1))
        if rest:
            self._noted.append(torch.mv(to[:, :rest], self._x[end : end + rest]))

    def add_up_noted(self, numbers: Floats) -> tuple[Floats, Floats]:
        noted, self._noted = self._noted, []
        summed = self._all_reduced(numbers, noted)
        told = self._bring_seen(summed)
        return told[: numbers.size], told[numbers.size :]

    def add_up(self, numbers: Floats, starts: Indices, sizes: Indices, key: int) -> Floats:
        places = self._places(starts, sizes)
        values = self._x if places is None else self._x[places]
        summed = self._all_reduced(numbers, [values])
        self._sums[key] = _Sums(places, summed[numbers.size :])
        return self._bring_seen(summed[: numbers.size]) if numbers.size else numbers

    def add_up_best(
        self, numbers: Floats, parts: list[tuple[int, int, int, int]], picks: Indices, key: int
    ) -> tuple[Floats, bool]:
        """`parts`: first entry, rows, width and how many picks of each."""
        noted, self._noted = self._noted, []
        summed = self._all_reduced(numbers, noted)
        lines = np.array(parts, np.int64)
        taken = best_rows(summed[numbers.size :], lines, picks, self._to_device)
        own = digits_of(taken.starts)
        together = torch.cat([own, self._x[taken.places]])
        assert self.adder is not None
        self.adder().all_reduce(together)
        self._sums[key] = _Sums(taken.places, together[own.numel() :])
        seen = together[: own.numel()]
        same = (seen == own * seen[0]).all().to(torch.float32).view(1)
        told = self._bring_seen(torch.cat([summed[: numbers.size], same]))
        return told[:-1], bool(told[-1])

    def largest_sum(self, key: int) -> float:
        if key not in self._largest:  # those of all exchanges in one stop
            keys = [each for each in self._sums if each not in self._largest]
            ranges = [torch.stack(torch.aminmax(self._sums[each].values)) for each in keys]
            for each, (low, high) in zip(keys, self._to_host(torch.stack(ranges)), strict=True):
                self._largest[each] = float(np.maximum(-low, high))
        return self._largest[key]

    def bring_sums(self, key: int) -> tuple[Indices, Floats, Floats]:
        places, sums = self._sums.pop(key)
        if places is None:
            brought = self._bring([sums, self._x])
            return np.empty(0, np.uint32), brought[0], brought[1]
        brought = self._bring([places.to(torch.int32), sums, self._x[places]])
        return brought[0].view(np.uint32), brought[1], brought[2]

    def commit_sums(self, key: int, divisor: float, unit: float) -> None:
        places, sums = self._sums.pop(key)
        means = sums / self._number(divisor) * self._number(unit)
        gone = self._energy(self._x if places is None else self._x[places])
        if self._bases is not None:
            if places is None:
                self._x.zero_()
            else:
                self._x[places] = 0.0
            torch._foreach_copy_(self._bases, self._parts)
        if places is None:
            self._x.copy_(means)
        else:
            self._x.zero_()
            self._x[places] = means
        torch._foreach_copy_(self._opened, self._parts)
        self._gone.append(gone)

    # ---- on the device, but for what must be known here ----------------------------------------

    def _places(self, starts: Indices, sizes: Indices) -> Tensor | None:
        """All entries of these runs; None: everywhere."""
        if starts.size == 0:
            return None
        if (sizes == 1).all():
            return self._widened(self._to_device(starts.view(np.int32)))
        ends = np.cumsum(sizes, dtype=np.int64)
        told = self._to_device(np.concatenate([starts - (ends - sizes), sizes.astype(np.int64)]))
        shifts, lengths = torch.split(told, [starts.size, sizes.size])
        total = int(ends[-1])
        spread = torch.repeat_interleave(shifts, lengths, output_size=total)
        return spread.add_(torch.arange(total, device=self.device))

    def _all_reduced(self, numbers: Floats, values: Sequence[Tensor]) -> Tensor:
        """Numbers, and values behind them, in memory of their own."""
        parts = [self._to_device(numbers), *values] if numbers.size else list(values)
        together = torch.cat(parts)
        assert self.adder is not None
        self.adder().all_reduce(together)
        return together

    def _bring_seen(self, values: Tensor) -> Floats:
        """To main memory, and what `survey` will be asked for with it."""
        if self._seen is not None or self._x.numel() == 0:
            return self._to_host(values)
        seen, told = self._bring([self._summary(), values])
        self._seen = float(seen[0]), float(seen[1])
        return told

    def _number(self, value: float) -> Tensor:
        """By one in main memory some devices would not divide: they multiply with its inverse."""
        return torch.full((), value, dtype=torch.float32, device=self.device)
