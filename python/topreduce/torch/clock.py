"""When a step begins: with the first forward pass after the last step."""

import contextlib
import time
import weakref
from typing import Any

import torch


class StepClock:
    """Watches the forward passes of one model, which owns what owns this."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._began: float | None = None
        self._handle = model.register_forward_pre_hook(_Notice(weakref.ref(self)))

    def forward(self) -> None:
        """A forward pass begins."""
        if self._began is None:
            self._began = time.perf_counter()

    def end(self) -> float | None:
        """The step is over: when it began, if that is known."""
        began, self._began = self._began, None
        return began

    def release(self) -> None:
        self._handle.remove()


class _Notice:
    """Called before each forward pass; those without gradients belong to no step."""

    def __init__(self, clock: "weakref.ref[StepClock]") -> None:
        self._clock = clock

    def __call__(self, module: torch.nn.Module, arguments: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        clock = self._clock()
        if clock is not None:
            clock.forward()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # a copy does nothing
