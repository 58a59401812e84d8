"""Notices a GradScaler that attach() was not told of, when it steps an optimizer of the model.

What is owed then holds the loss scale of the step it is from, and is delivered with another. No
object says who scales a loss, so the stack is looked at: GradScaler.step calls Optimizer.step.
"""

import sys
import warnings
from collections.abc import Iterable
from typing import Protocol

import torch
from torch.optim.optimizer import Optimizer

from topreduce.torch.optimizers import StepListener

_DEPTH = 24  # frames between the two at most; frameworks wrap Optimizer.step


class Scaler(Protocol):
    """torch.amp.GradScaler, or anything else that multiplies the loss."""

    def get_scale(self) -> float: ...


class ScalerWatch(StepListener):
    """Watches the optimizers of one model, and warns once."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], given: Scaler | None) -> None:
        """`given`: the scaler that attach() knows."""
        self._parameters = {id(parameter) for parameter in parameters}
        self._given = given
        # A scaler that is not PyTorch's may have one inside.
        if given is None or isinstance(given, torch.amp.GradScaler):
            self.listen()

    def before_step(self, optimizer: Optimizer) -> None:
        if not self._has_part_in(optimizer):
            return
        scaler = _stepping_scaler()
        if scaler is None or scaler is self._given or not scaler.is_enabled():
            return
        self.ignore()
        warnings.warn(
            "a GradScaler steps an optimizer of this model, and is not the one that topreduce "
            "knows: as its scale changes, what is owed is delivered with the wrong factor. Give "
            "it to topreduce.torch.attach(..., scaler=scaler)",
            RuntimeWarning,
            stacklevel=2,
        )

    def _has_part_in(self, optimizer: Optimizer) -> bool:
        groups = optimizer.param_groups
        return any(id(each) in self._parameters for group in groups for each in group["params"])


def _stepping_scaler() -> torch.amp.GradScaler | None:
    """The GradScaler whose step() we are in."""
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame.f_code.co_name == "step":
            caller = frame.f_locals.get("self")
            if isinstance(caller, torch.amp.GradScaler):
                return caller
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
