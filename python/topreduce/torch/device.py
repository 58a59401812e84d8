"""What passes over all entries of a gradient, as torch operations where the gradient lives.

The core decides what is sent and calls back a few times for each exchange; topreduce/device.h says
what each call must do. Only chosen entries come to main memory. Results are those of the core's own
kernels, bit for bit.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from topreduce._core import Device
from topreduce.torch.lane import Lane, is_foreign

Floats = NDArray[np.float32]
Indices = NDArray[np.uint32]


class GradientDevice(Device):
    """Gradients in DDP's buckets, and what is owed of them, on one device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.lane = Lane(device)
        self._wide = torch.float32 if device.type == "mps" else torch.float64  # for statistics
        self._gradients: dict[int, Tensor] = {}  # by number of the parameter
        self._owed = torch.zeros(0, device=device)
        self._close()

    def hold(self, numbers: Sequence[int], sizes: Sequence[int], bucket: Tensor) -> None:
        """The open step's gradients of these parameters lie in `bucket`, one after the other.

        In any floating type: those of the open exchange alone are copied to fp32.
        """
        self._gradients.update(zip(numbers, _split(bucket, sizes), strict=True))

    def release(self) -> None:
        """The step is over."""
        self._gradients.clear()
        self._close()

    def _close(self) -> None:
        self._opened: list[Tensor] = []  # the gradients of the open exchange ...
        self._bases: list[Tensor] | None = None  # ... what is owed there ...
        self._scale = 1.0
        self._x = torch.zeros(0, device=self.device)  # ... and what both come to, in one piece
        self._parts: list[Tensor] = []  # of the same, by parameter
        self._seen: tuple[float, float] | None = None

    # ---- what the core asks for ----------------------------------------------------------------

    def open(self, numbers: Sequence[int], offsets: Sequence[int] | None, scale: float) -> None:
        """`offsets`: where each parameter starts in what is owed; None leaves that out."""
        self._close()
        self._opened = [self._gradients[number] for number in numbers]
        self._scale = scale
        sizes = [part.numel() for part in self._opened]
        self._x = torch.empty(sum(sizes), dtype=torch.float32, device=self.device)
        self._parts = _split(self._x, sizes)
        torch._foreach_copy_(self._parts, self._opened)
        if scale != 1:
            self._x *= scale
        if offsets is not None:
            places = zip(offsets, sizes, strict=True)
            self._bases = [self._owed[start : start + size] for start, size in places]
            torch._foreach_add_(self._parts, self._bases)

    def survey(self) -> tuple[float, float]:
        """The sum of squares, and the largest magnitude: NaN if there is one."""
        if self._seen is None and self._x.numel() == 0:
            self._seen = 0.0, 0.0
        if self._seen is None:
            low, high = torch.aminmax(self._x)
            largest = torch.maximum(-low, high).to(self._wide)
            energy, largest = torch.stack([self._energy(self._x), largest]).tolist()
            self._seen = energy, largest
        return self._seen

    def strongest(self, floor: float, limits: Sequence[int]) -> tuple[Indices, Floats]:
        places = ((self._x >= floor) | (self._x <= -floor)).nonzero().squeeze(1)
        if len(limits) == 1:
            places = _cut(places, self._x, limits[0])
        else:
            sizes = [part.numel() for part in self._parts]
            ends = torch.tensor(sizes, device=self.device).cumsum(0)
            bounds = [0, *torch.searchsorted(places, ends).tolist()]
            counts = [end - start for start, end in itertools.pairwise(bounds)]
            if any(count > limit for count, limit in zip(counts, limits, strict=True)):
                found = zip(_split(places, counts), limits, strict=True)
                places = torch.cat([_cut(part, self._x, limit) for part, limit in found])
        indices = self._to_host(places.to(torch.int32)).view(np.uint32)
        return indices, self._to_host(self._x[places])

    def sample(self, firsts: Sequence[int], stride: int) -> tuple[Floats, Floats]:
        def every(parts: Iterable[Tensor]) -> Tensor:
            pairs = zip(parts, firsts, strict=True)
            return torch.cat([part[first::stride] for part, first in pairs])

        gradients = every(self._opened).float()
        if self._scale != 1:
            gradients = gradients * self._scale
        return self._to_host(every(self._parts)), self._to_host(gradients)

    def evaluate(self) -> Floats:
        return self._to_host(self._x)

    def commit(self, settled_at: Indices, settled: Floats, mean_at: Indices, mean: Floats) -> float:
        # All that needs memory comes before anything is written.
        places, values = self._places(settled_at), self._to_device(settled)
        mean_places, means = self._places(mean_at), self._to_device(mean)
        had = self._x[places]
        left = had - values
        gone = self._energy(had) - self._energy(left)
        if self._bases is not None:
            self._x[places] = left
            torch._foreach_copy_(self._bases, self._parts)
        self._x.zero_()
        self._x[mean_places] = means
        torch._foreach_copy_(self._opened, self._parts)
        return float(gone)

    def commit_whole(self, settled: Floats | None, mean: Floats) -> float:
        means = self._to_device(mean)
        gone = self._energy(self._x)
        self._x -= self._x.clone() if settled is None else self._to_device(settled)
        gone = gone - self._energy(self._x)
        if self._bases is not None:
            torch._foreach_copy_(self._bases, self._parts)
        self._x.copy_(means)
        torch._foreach_copy_(self._opened, self._parts)
        return float(gone)

    def spoil(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._gradients[number].fill_(torch.nan)

    def read(self) -> Floats:
        with self.lane.behind(self.lane.mark()):
            return self._to_host(self._owed)

    def write(self, owed: Floats) -> None:
        with self.lane.behind(self.lane.mark()):
            self._owed = self._to_device(owed)

    # ---- between the memories ------------------------------------------------------------------

    def _to_host(self, tensor: Tensor) -> NDArray[Any]:
        array: NDArray[Any] = self.lane.to_host(tensor).numpy()
        return array

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return self.lane.to_device(torch.from_numpy(array))

    def _places(self, indices: Indices) -> Tensor:
        return self._to_device(indices.astype(np.int64))

    def _energy(self, values: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(values, dtype=self._wide)
        return norm.square()


def device_of(parameters: Iterable[Tensor]) -> GradientDevice | None:
    """Of a model that lies on one device that the core cannot look into; None otherwise."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1 or not is_foreign(device := devices.pop()):
        return None
    return GradientDevice(device)


def _split(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(torch.split(tensor, list(sizes)))


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
    return places[stronger | (ties & (ties.cumsum(0) <= wanted))]
