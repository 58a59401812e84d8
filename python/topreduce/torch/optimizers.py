"""What is to be seen when an optimizer steps.

One hook for all who want to know, which stays: torch walks over its hooks while they run, so none
may come or go in one, nor whenever the garbage collector likes.
"""

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Adam
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_WORTH_IT = 1_000_000  # entries


class StepListener:
    """Hears of every step of any optimizer of this process, from listen() to ignore()."""

    def listen(self) -> None:
        if not _listening:
            register_optimizer_step_pre_hook(_before_step)
            _listening.append(True)
        _listeners.add(self)

    def ignore(self) -> None:
        _listeners.discard(self)

    def before_step(self, optimizer: Optimizer) -> None:
        raise NotImplementedError


_listeners: "weakref.WeakSet[StepListener]" = weakref.WeakSet()
_listening: list[bool] = []  # True once there is a hook


def _before_step(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for listener in list(_listeners):
        listener.before_step(optimizer)


class FusedHint(StepListener):
    """Warns at the first step of an optimizer of these parameters, if sparse means make it slow.

    The means are zero at most places. On a CPU, Adam spends twice as long on them as on dense
    ones, in torch's square root of zeros, unless it is fused.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._entries = {id(each): each.numel() for each in parameters if each.device.type == "cpu"}
        if sum(self._entries.values()) >= _WORTH_IT:
            self.listen()

    def before_step(self, optimizer: Optimizer) -> None:
        mine = [
            (group, sum(self._entries.get(id(each), 0) for each in group["params"]))
            for group in optimizer.param_groups
        ]
        if not any(entries for _, entries in mine):
            return
        self.ignore()
        slow = sum(entries for group, entries in mine if not group.get("fused"))
        if isinstance(optimizer, Adam) and slow >= _WORTH_IT:  # AdamW is one
            name = type(optimizer).__name__
            warnings.warn(
                f"on a CPU, {name} takes about twice as long on sparse means as on dense ones; "
                f"{name}(..., fused=True) is faster on both",
                UserWarning,
                stacklevel=2,
            )
