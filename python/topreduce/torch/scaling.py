"""Notices a GradScaler that attach() was not told of, when it steps an optimizer of the model.

What is owed then holds the loss scale of the step it is from, and is delivered with another. No
object says who scales a loss, so the stack is looked at: GradScaler.step calls Optimizer.step.
"""

import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

_DEPTH = 24  # frames between the two at most; frameworks wrap Optimizer.step


class Scaler(Protocol):
    """torch.amp.GradScaler, or anything else that multiplies the loss."""

    def get_scale(self) -> float: ...


class ScalerWatch:
    """Watches the optimizers of one model, and warns once."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], given: Scaler | None) -> None:
        """`given`: the scaler that attach() knows."""
        self._parameters = {id(parameter) for parameter in parameters}
        self._given = given
        # A scaler that is not PyTorch's may have one inside.
        if given is None or isinstance(given, torch.amp.GradScaler):
            _watches.add(self)
            _listen()

    def release(self) -> None:
        _watches.discard(self)
        if not _watches:
            _stop_listening()

    def notice(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        if scaler is self._given or not scaler.is_enabled() or not self._has_part_in(optimizer):
            return
        _watches.discard(self)
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


_watches: "weakref.WeakSet[ScalerWatch]" = weakref.WeakSet()
_handles: list[RemovableHandle] = []  # of the one hook of all watches


def _listen() -> None:
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))


def _stop_listening() -> None:
    while _handles:
        _handles.pop().remove()


def _before_step(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
    if torch.compiler.is_compiling() or not _watches:
        return
    scaler = _stepping_scaler()
    if scaler is not None:
        for watch in list(_watches):
            watch.notice(optimizer, scaler)


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
