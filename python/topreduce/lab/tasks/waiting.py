"""The shapes of a model, gradients of noise, and a wait in place of the arithmetic.

So a machine with few cores can stand for hosts with accelerators.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_BLOCKS = 6
_GRADIENTS = 8  # for ranks and steps to draw from
_SPREAD = 1.5  # of the logarithm of an entry's size


class Waiting:
    """A task, see `models.Task`, that computes nothing.

    A third of the wait is the forward pass; in the backward pass a parameter's gradient comes when
    its share of the entries is through.
    """

    optimizer = "none"
    learning_rate = 0.0

    def __init__(self, shapes: Sequence[torch.Size], compute: float, seed: int) -> None:
        self.model: nn.Module = _Shapes(shapes, compute)
        self._gradients = _gradients(sum(map(math.prod, shapes)), seed)

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        order = torch.randperm(_GRADIENTS, generator=torch.Generator().manual_seed(step))
        waited: Tensor = model(self._gradients[order[rank % _GRADIENTS]])
        return waited

    def validation_loss(self, part: int, parts: int) -> float:
        return math.nan

    def sample(self, size: int) -> str:
        return ""


@functools.lru_cache(maxsize=1)
def _gradients(entries: int, seed: int) -> Tensor:
    """Noise, in which some entries are larger than others in all steps and ranks, as in gradients.

    Kept for all methods of a race: it is many times the size of the model.
    """
    generator = torch.Generator().manual_seed(seed)
    lasting = torch.randn(entries, generator=generator).mul_(_SPREAD).exp_()
    return torch.randn(_GRADIENTS, entries, generator=generator).mul_(lasting)


class _Shapes(nn.Module):
    """In blocks of consecutive parameters, as models are sharded by."""

    def __init__(self, shapes: Sequence[torch.Size], compute: float) -> None:
        super().__init__()
        entries = sum(map(math.prod, shapes))
        self._forward_seconds = compute / 3
        self._seconds_per_entry = 2 * compute / 3 / entries
        share = entries / _BLOCKS
        groups: list[list[torch.Size]] = [[]]
        for shape in shapes:
            groups[-1].append(shape)
            if sum(each.numel() for each in groups[-1]) >= share:
                groups.append([])
        self.blocks = nn.ModuleList(_Block(group) for group in groups if group)
        self._sizes = [sum(each.numel() for each in group) for group in groups if group]

    def forward(self, gradients: Tensor) -> Tensor:
        time.sleep(self._forward_seconds)
        value = torch.zeros((), requires_grad=True)
        end = 0
        for block, size in zip(self.blocks, self._sizes, strict=True):
            value = block(value, gradients[end:], self._seconds_per_entry)
            end += size
        return value


class _Block(nn.Module):
    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, value: Tensor, gradients: Tensor, seconds_per_entry: float) -> Tensor:
        end = 0
        for parameter in self.tensors:
            gradient = gradients[end : end + parameter.numel()].view(parameter.shape)
            end += parameter.numel()
            seconds = seconds_per_entry * parameter.numel()
            value = _Wait.apply(value, parameter, gradient, seconds)  # type: ignore[no-untyped-call]
        return value


class _Wait(torch.autograd.Function):
    """Passes a value on; backwards it waits, then gives the parameter its gradient."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, parameter: Tensor, gradient: Tensor, seconds: float
    ) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        time.sleep(ctx.seconds)
        return outputs[0], ctx.gradient, None, None
