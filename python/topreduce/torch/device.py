"""What passes over all entries of a gradient, as torch operations where the gradient lives.

The core decides what is sent and calls back a few times for each exchange; topreduce/device.h says
what each call must do. Only chosen entries come to main memory. Results are those of the core's own
kernels, bit for bit.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from topreduce._core import Device
from topreduce.torch.lane import Lane, is_foreign
from topreduce.torch.strongest import WIDE, Above

Floats = NDArray[np.float32]
Indices = NDArray[np.uint32]

_SEEN_AS = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.int32: np.int32,
}
_PIECE = 1 << 22  # entries of what is owed that travel at a time: torch keeps pinned memory
_STOPS = 100  # of the device in a step, at most about so many: two for each exchange


def bucket_cap_mb(entries: float) -> float:
    """The default on a device for a model of this size."""
    return max(1.0, entries * 4 / 2**20 / (_STOPS / 2 - 2))


Question = tuple[float, tuple[int, ...]]  # a floor, and limits
Found = tuple[Indices, Floats]


class _Sampled(NamedTuple):
    firsts: Sequence[int]
    stride: int
    values: Floats
    gradients: Floats


class GradientDevice(Device):
    """Gradients in DDP's buckets, and what is owed of them, on one device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.lane = Lane(device)
        self._wide = torch.float32 if device.type == "mps" else torch.float64  # for statistics
        self._gradients: dict[int, Tensor] = {}  # by number of the parameter
        self._owed = torch.empty(0, device=device)
        self._gone: list[Tensor] = []  # energy, by commit
        self._close()

    def hold(self, numbers: Sequence[int], sizes: Sequence[int], bucket: Tensor) -> None:
        """The open step's gradients of these parameters lie in `bucket`, one after the other.

        In any floating type: those of the open exchange alone are copied to fp32.
        """
        self._gradients.update(zip(numbers, _split(bucket, sizes), strict=True))

    def release(self) -> None:
        """The step is over."""
        self._gradients.clear()
        self._gone.clear()
        self._close()

    def _close(self) -> None:
        self._opened: list[Tensor] = []  # the gradients of the open exchange ...
        self._bases: list[Tensor] | None = None  # ... what is owed there ...
        self._scale = 1.0
        self._x = torch.empty(0, device=self.device)  # ... and what both come to, in one piece
        self._parts: list[Tensor] = []  # of the same, by parameter
        self._seen: tuple[float, float] | None = None
        self._expected: dict[Question, None] = {}
        self._counted: dict[Question, tuple[Above, NDArray[np.int32]]] = {}
        self._found: dict[Question, Found] = {}
        self._to_sample: tuple[list[int], int] | None = None
        self._sampled: _Sampled | None = None

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

    def expect(self, floor: float, limits: list[int], firsts: list[int], stride: int) -> None:
        self._expected[floor, tuple(limits)] = None
        if stride:
            self._to_sample = firsts, stride

    def survey(self) -> tuple[float, float]:
        """The sum of squares, and the largest magnitude: NaN if there is one."""
        if self._seen is None and self._x.numel() == 0:
            self._seen = 0.0, 0.0
        if self._seen is None:
            # What the core will ask for next comes along: one stop instead of three.
            asked = {question: self._above(question) for question in self._expected}
            sample = [] if self._to_sample is None else self._every(*self._to_sample)
            counts = [above.counts for above in asked.values()]
            seen, *brought = self._bring([self._summary(), *sample, *counts])
            if self._to_sample is not None:
                self._sampled = _Sampled(*self._to_sample, brought[0], brought[1])
            told = zip(asked.items(), brought[len(sample) :], strict=True)
            self._counted = {question: (above, heard) for (question, above), heard in told}
            self._seen = float(seen[0]), float(seen[1])
        return self._seen

    def strongest(self, floor: float, limits: Sequence[int]) -> Found:
        question = floor, tuple(limits)
        if self._x.numel() == 0:
            return np.empty(0, np.uint32), np.empty(0, np.float32)
        if question not in self._found:
            if question not in self._counted:
                above = self._above(question)
                self._counted = {question: (above, self._bring([above.counts])[0])}
            self._find_counted()
        return self._found.pop(question)

    def _above(self, question: Question) -> Above:
        floor, limits = question
        sizes = [part.numel() for part in self._parts]
        return Above(self._x, floor, limits, sizes, self._to_device)

    def _find_counted(self) -> None:
        """Answers all questions whose counts are known, in one stop."""
        counted, self._counted = self._counted, {}
        places = [above.strongest(heard) for above, heard in counted.values()]
        values = [self._x[each] for each in places]
        if not any(each.numel() for each in places):
            empty = np.empty(0, np.uint32), np.empty(0, np.float32)
            self._found = dict.fromkeys(counted, empty)
            return
        brought = self._bring([each.to(torch.int32) for each in places] + values)
        for number, question in enumerate(counted):
            indices, found = brought[number], brought[len(counted) + number]
            self._found[question] = indices.view(np.uint32), found

    def sample(self, firsts: Sequence[int], stride: int) -> tuple[Floats, Floats]:
        sampled = self._sampled
        if sampled is not None and (sampled.firsts, sampled.stride) == (firsts, stride):
            return sampled.values, sampled.gradients
        values, gradients = self._bring(self._every(firsts, stride))
        return values, gradients

    def evaluate(self) -> Floats:
        return self._to_host(self._x)

    def commit(self, settled_at: Indices, settled: Floats, mean_at: Indices, mean: Floats) -> None:
        # All that needs memory comes before anything is written.
        sent = [settled_at.view(np.int32), settled.view(np.int32)]
        sent += [mean_at.view(np.int32), mean.view(np.int32)]
        parts = _split(self._to_device(np.concatenate(sent)), [each.size for each in sent])
        places, values = self._widened(parts[0]), parts[1].view(torch.float32)
        mean_places, means = self._widened(parts[2]), parts[3].view(torch.float32)
        had = self._x[places]
        left = had - values
        gone = self._energy(had) - self._energy(left)
        if self._bases is not None:
            self._x[places] = left
            torch._foreach_copy_(self._bases, self._parts)
        self._x.zero_()
        self._x[mean_places] = means
        torch._foreach_copy_(self._opened, self._parts)
        self._gone.append(gone)

    def commit_whole(self, settled: Floats | None, mean: Floats) -> None:
        means = self._to_device(mean)
        gone = self._energy(self._x)
        self._x -= self._x.clone() if settled is None else self._to_device(settled)
        gone = gone - self._energy(self._x)
        if self._bases is not None:
            torch._foreach_copy_(self._bases, self._parts)
        self._x.copy_(means)
        torch._foreach_copy_(self._opened, self._parts)
        self._gone.append(gone)

    def settled_energy(self) -> float:
        gone = self._gone
        self._gone = []
        return sum(self._to_host(torch.stack(gone)).tolist()) if gone else 0.0

    def adds_up(self) -> bool:
        return False

    def spoil(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._gradients[number].fill_(torch.nan)

    def read(self) -> Floats:
        found = np.empty(self._owed.numel(), np.float32)
        with self.lane.behind(self.lane.mark()):
            for start in range(0, found.size, _PIECE):
                piece = slice(start, start + _PIECE)
                found[piece] = self._to_host(self._owed[piece])
        return found

    def write(self, owed: Floats) -> None:
        with self.lane.behind(self.lane.mark()):
            fresh = torch.empty(owed.size, dtype=torch.float32, device=self.device)
            for start in range(0, owed.size, _PIECE):
                piece = slice(start, start + _PIECE)
                fresh[piece] = self._to_device(owed[piece])
            self._owed = fresh

    # ---- between the memories ------------------------------------------------------------------

    def _to_host(self, tensor: Tensor) -> NDArray[Any]:
        array: NDArray[Any] = self.lane.to_host(tensor).numpy()
        return array

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return self.lane.to_device(torch.from_numpy(array))

    def _bring(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        """To main memory, in one copy."""
        words = self._to_host(torch.cat([each.view(torch.int32) for each in tensors]))
        found, start = [], 0
        for each in tensors:
            size = each.numel() * each.element_size() // 4
            found.append(words[start : start + size].view(_SEEN_AS[each.dtype]))
            start += size
        return found

    def _widened(self, indices: Tensor) -> Tensor:
        wide = indices.long()
        return wide if self._x.numel() < WIDE else wide.bitwise_and_(0xFFFFFFFF)

    # ---- on the device, without a stop ---------------------------------------------------------

    def _every(self, firsts: Sequence[int], stride: int) -> list[Tensor]:
        def every(parts: Iterable[Tensor]) -> Tensor:
            pairs = zip(parts, firsts, strict=True)
            return torch.cat([part[first::stride] for part, first in pairs])

        gradients = every(self._opened).float()
        if self._scale != 1:
            gradients = gradients * self._scale
        return [every(self._parts), gradients]

    def _summary(self) -> Tensor:
        """What `survey` tells."""
        low, high = torch.aminmax(self._x)
        return torch.stack([self._energy(self._x), torch.maximum(-low, high).to(self._wide)])

    def _energy(self, values: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(values, dtype=self._wide)
        return norm.square()


def place_of(parameters: Iterable[Tensor]) -> torch.device | None:
    """Of a model that lies on one device that the core cannot look into; None otherwise."""
    devices = {parameter.device for parameter in parameters}
    device = devices.pop() if len(devices) == 1 else None
    return device if device is not None and is_foreign(device) else None


def _split(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(torch.split(tensor, list(sizes)))
