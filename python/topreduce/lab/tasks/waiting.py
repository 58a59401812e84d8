"""The shapes of a model, gradients of noise, and a wait in place of the arithmetic.

So a machine with few cores can stand for hosts with accelerators.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_BLOCKS = 6


class Waiting:
    """A task, see `models.Task`, that computes nothing.

    A third of the wait is the forward pass; in the backward pass a parameter's gradient comes when
    its share of the entries is through.
    """

    optimizer = "none"
    learning_rate = 0.0

    def __init__(self, shapes: Sequence[torch.Size], compute: float, seed: int) -> None:
        self.model: nn.Module = _Shapes(shapes)
        entries = sum(each.numel() for each in self.model.parameters())
        self._forward = compute / 3
        self._seconds_per_entry = 2 * compute / 3 / entries
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(2 * entries + 1, generator=generator)
        self._noise = noise * noise.abs()  # long tails, as gradients have

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        time.sleep(self._forward)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        start = int(torch.randint(len(self._noise) // 2, (), generator=generator))
        waited: Tensor = model(self._noise[start:], self._seconds_per_entry)
        return waited

    def validation_loss(self, part: int, parts: int) -> float:
        return math.nan

    def sample(self, size: int) -> str:
        return ""


class _Shapes(nn.Module):
    """In blocks of consecutive parameters, as models are sharded by."""

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        super().__init__()
        share = sum(shape.numel() for shape in shapes) / _BLOCKS
        groups: list[list[torch.Size]] = [[]]
        for shape in shapes:
            groups[-1].append(shape)
            if sum(each.numel() for each in groups[-1]) >= share:
                groups.append([])
        self.blocks = nn.ModuleList(_Block(group) for group in groups if group)
        self._sizes = [sum(each.numel() for each in group) for group in groups if group]

    def forward(self, noise: Tensor, seconds_per_entry: float) -> Tensor:
        value = torch.zeros((), requires_grad=True)
        end = 0
        for block, size in zip(self.blocks, self._sizes, strict=True):
            value = block(value, noise[end:], seconds_per_entry)
            end += size
        return value


class _Block(nn.Module):
    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, value: Tensor, noise: Tensor, seconds_per_entry: float) -> Tensor:
        end = 0
        for parameter in self.tensors:
            gradient = noise[end : end + parameter.numel()].view(parameter.shape)
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
