"""A hint about optimizers that sparse means make slow.

The means are zero at most places. On a CPU, Adam spends twice as long on them as on dense ones, in
torch's square root of zeros, unless it is fused.
"""

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Adam
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_WORTH_IT = 1_000_000  # entries


class FusedHint:
    """Waits for the first step of an optimizer of these parameters, and warns if it is slow."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._entries = {id(each): each.numel() for each in parameters if each.device.type == "cpu"}
        self._handle = None
        if sum(self._entries.values()) >= _WORTH_IT:
            hint = weakref.ref(self)

            def before_step(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
                waiting = hint()
                if waiting is not None and not torch.compiler.is_compiling():
                    waiting._look(optimizer)

            self._handle = register_optimizer_step_pre_hook(before_step)
            weakref.finalize(self, self._handle.remove)

    def release(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _look(self, optimizer: Optimizer) -> None:
        mine = [
            (group, sum(self._entries.get(id(each), 0) for each in group["params"]))
            for group in optimizer.param_groups
        ]
        if not any(entries for _, entries in mine):
            return
        self.release()
        slow = sum(entries for group, entries in mine if not group.get("fused"))
        if isinstance(optimizer, Adam) and slow >= _WORTH_IT:  # AdamW is one
            name = type(optimizer).__name__
            warnings.warn(
                f"on a CPU, {name} takes about twice as long on sparse means as on dense ones; "
                f"{name}(..., fused=True) is faster on both",
                UserWarning,
                stacklevel=2,
            )
