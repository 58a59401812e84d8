"""A model of the user's: `--model package.module:make`."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_KEPT_BACK = 8  # batches to evaluate on, unless the task does that itself


def own_maker(name: str) -> Callable[[], Any]:
    """What "package.module:make" names; ValueError, with what is wrong, if that is nothing."""
    match = re.fullmatch(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)", name)
    known = "--help lists those there are; your own is package.module:make"
    if match is None:
        raise ValueError(f"unknown model {name!r}; {known}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(match[1])
    except ImportError as error:
        raise ValueError(f"model {name!r}: {error}; {known}") from None
    make: Callable[[], Any] | None = getattr(module, match[2], None)
    if not callable(make):
        raise ValueError(f"model {name!r}: {match[1]} has no function {match[2]!r}")
    return make


class OwnTask:
    """What the user's function made, with what it left out."""

    def __init__(self, made: Any) -> None:
        """It must have `model`, and `loss(model, rank, step)`: of the batch of this rank and step.

        It may have `validation_loss(part, parts)`; else held-out data is that of negative steps.
        """
        for name in ("model", "loss"):
            if not hasattr(made, name):
                raise ValueError(f"{type(made).__name__} has no {name}: see docs/lab.md")
        self._made = made
        self.model: nn.Module = made.model
        self.learning_rate: float = getattr(made, "learning_rate", 1e-3)
        self.optimizer: str = getattr(made, "optimizer", "adamw")

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        loss: Tensor = self._made.loss(model, rank, step)
        return loss

    @torch.no_grad()
    def validation_loss(self, part: int, parts: int) -> float:
        if hasattr(self._made, "validation_loss"):
            return float(self._made.validation_loss(part, parts))
        training = self.model.training
        self.model.eval()
        losses = [self.loss(self.model, part, -1 - batch) for batch in range(_KEPT_BACK)]
        self.model.train(training)
        return float(torch.stack(losses).mean())

    def sample(self, size: int) -> str:
        return ""
