"""Gradients on the devices of a machine's ranks, which are added up before anyone looks at them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from topreduce.torch.summing_device import SummingDevice


class MachineDevice(SummingDevice):
    """Whole buckets of DDP, in fp32: sums are not rounded to the type of the gradients."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._buckets: dict[int, Tensor] = {}  # by number of the first parameter
        self._homes: list[tuple[Tensor, Tensor]] = []  # of those that are copies

    def hold(self, numbers: Sequence[int], sizes: Sequence[int], bucket: Tensor) -> None:
        gradient = self._buckets[numbers[0]] = bucket.float()
        if gradient is not bucket:
            self._homes.append((bucket, gradient))
        super().hold(numbers, sizes, gradient)

    def bucket(self, first: int) -> Tensor:
        """That of the open step which begins with this parameter."""
        return self._buckets[first]

    def number(self, value: float) -> Tensor:
        """To divide buckets by, or to multiply."""
        return self._number(value)

    def give_back(self) -> None:
        """What is in the buckets goes where the gradients came from."""
        for home, gradient in self._homes:
            home.copy_(gradient)

    def release(self) -> None:
        self._buckets.clear()
        self._homes.clear()
        super().release()
