"""DiLoCo (arXiv:2311.08105), a baseline: each rank trains alone, now and then they meet.

After every `period` steps the ranks average how far they have come, and take it as the gradient of
a second optimizer: SGD with Nesterov's momentum. Its learning rate and momentum are the paper's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector

_LEARNING_RATE = 0.7
_MOMENTUM = 0.9


class DiLoCo:
    """The outer optimizer of one replica."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], period: int) -> None:
        with torch.no_grad():
            self._start = parameters_to_vector(parameters).clone()  # where all ranks met last
        self._momentum = torch.zeros_like(self._start)
        self._period = period
        self._steps = 0

    @torch.no_grad()
    def average_parameters(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """To be called after every step of the inner optimizer. Collective."""
        self._steps += 1
        if self._steps % self._period:
            return
        own = list(parameters)
        gradient = self._start - parameters_to_vector(own)
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        self._momentum.mul_(_MOMENTUM).add_(gradient)
        self._start -= _LEARNING_RATE * (gradient + _MOMENTUM * self._momentum)
        sizes = [each.numel() for each in own]
        for each, part in zip(own, torch.split(self._start, sizes), strict=True):
            each.copy_(part.view_as(each))
