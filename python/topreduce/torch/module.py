"""Gradients of a module that nothing else averages, and the way their means take back into `grad`.

A pass begins with the first gradient that comes to the module's output, or to one of its
parameters, and ends when the engine has done all its work. What was not taken by then (taker.py) is
handed over, and backward() waits for the means. Whatever stands in `grad` is averaged: passes in
`hold` are added up before.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from topreduce import Reducer
from topreduce.torch import dense
from topreduce.torch.device import GradientDevice
from topreduce.torch.eligibility import HOOKED, is_stepped
from topreduce.torch.gradients import Marks, Pass, Shards, flat, home_of, largest, lies_like
from topreduce.torch.kinds import plain_name
from topreduce.torch.meeting import Ranks
from topreduce.torch.steps import Steps, is_in_backward
from topreduce.torch.taker import Batch, Taker


class ModuleAdapter:
    """Averages the gradients of one module, of which it keeps nothing but the parameters."""

    def __init__(
        self,
        module: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        group: dist.ProcessGroup | Ranks,
        shards: Shards,
        steps: Steps,
        reducer: Reducer,
        device: GradientDevice | None,
    ) -> None:
        """`parameters`: those to average, in the layout's order. `group`: the ranks that average;
        after `release` it does so by itself. `device`: the one that the reducer uses.
        """
        self.owed = ""  # in words, what a handle left unpaid
        self._module = weakref.ref(module)
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._homes = [home_of(shards.local(each)) for each in self._parameters]
        self._group, self._shards = group, shards
        self._steps: Steps | None = steps
        self._reducer, self._device = reducer, device
        self._held = 0
        self._objected = ""  # to the open pass, and why
        self._pass: Pass | None = None
        self._open: weakref.ref[_Token] | None = None  # dead once the pass is over or cut short
        self.taker = Taker(parameters, self._take, self._object, shards.local, self._arrive)
        self.taker.plan(reducer.buckets)
        self._handle = module.register_forward_hook(_ForwardHook(weakref.ref(self)))

    @property
    def attached(self) -> bool:
        return self._steps is not None

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Backward passes inside add up in `grad`, and are averaged with the next one outside."""
        if is_in_backward():
            raise ValueError("hold() is for whole backward passes: call it outside of backward()")
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def release(self, owed: str) -> None:
        """From now on dense means, by the group itself, since nobody else averages."""
        self._steps, self._device, self.owed = None, None, owed

    def regroup(self, group: dist.ProcessGroup | Ranks) -> None:
        self._group = group

    def remove(self) -> None:
        """Another adapter takes over."""
        self._handle.remove()
        self.taker.release()

    # ---- inside of backward() ------------------------------------------------------------------

    def begin(self) -> None:
        """A gradient has come: of a new pass, or of the one that is open."""
        if self._held or (self._open is not None and self._open() is not None):
            return
        token = _Token()
        self._open = weakref.ref(token)
        end = functools.partial(_end, weakref.ref(self), token)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._pass = None
        early = self._steps is not None and self._device is None
        early = early and self._reducer.spec["granularity"] == "bucket"
        self.taker.begin(takes=early and self.taker.learnt)
        self._objected = ""
        objection = self._objection()
        if objection:
            self._object(objection)

    def _objection(self) -> str:
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if len(parameter._post_accumulate_grad_hooks) > 1 or is_stepped(parameter):
                return f"{name} {HOOKED}"
        module = self._module()
        now = {} if module is None else dict(module.named_parameters())
        now = {plain_name(name): parameter for name, parameter in now.items()}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            other = now.get(name, parameter)
            if other is not parameter and type(other) is type(parameter):  # else FSDP unsharded it
                return (
                    f"{name} is another parameter than at attach(), as after "
                    "load_state_dict(assign=True): detach() and attach again"
                )
        return self._shards.objection()

    def _arrive(self) -> None:
        if not is_in_backward():
            raise ValueError(
                "gradients come outside of backward(), as in pipeline schedules "
                "(torch.distributed.pipelining), which are not supported: use a model without "
                "pipeline stages, or do not attach to them"
            )
        self.begin()

    def end(self) -> None:
        """The engine has done its work."""
        taker, steps = self.taker, self._steps
        self._open = None
        if (
            taker.idle and not self._objected
        ):  # FSDP2 was told to keep the gradients of this pass to itself
            taker.open, self._pass = False, None
            return
        if steps is None:
            taker.end()
            if self._objected:
                raise ValueError(self._objected)
            if isinstance(self._group, Ranks):
                raise ValueError(
                    "detached, and nobody averages the gradients: these ranks have no process "
                    "group; attach again"
                )
            nobodys = dense.average(self._parameters, taker.used, self._shards, self._group)
            self._tell_delivered(nobodys)
            taker.forget_use()
            return
        everything = range(len(self._parameters))
        early = {number for number in everything if taker.was_taken(number)}
        taker.complete(everything)
        order = list(taker.order)
        taker.end()
        current = self._current(steps)
        late = [number for number in order if number not in early]
        rest = [(number, self._gradient(current, number)) for number in late]
        unused = [number for number in everything if not taker.used[number]]
        marks = current.mark(gradient for _, gradient in rest)
        steps.hand_over(current.step, lambda: self._add_rest(current, rest, marks, unused))
        self._pass = None
        steps.close(current.step, current)
        current.step.over.wait()
        current.join()
        taker.forget_use()
        if current.step.error is not None:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    self._shards.local(parameter.grad).zero_()
            raise current.step.error.with_traceback(None)
        self._hand_out(current)

    def _hand_out(self, current: Pass) -> None:
        """Parameters that others used have a gradient here too; those of nobody stay."""
        nobodys = set(self._reducer.unused)
        for number, mean in current.made.items():
            if number not in nobodys:
                parameter = self._parameters[number]
                local = self._shards.local(parameter)
                gradient = torch.empty_like(
                    self._homes[number], dtype=local.dtype, device=local.device
                )
                flat(gradient).copy_(mean)
                parameter.grad = self._shards.gradient(parameter, gradient)
        self._tell_delivered(nobodys)

    def _tell_delivered(self, nobodys: set[int]) -> None:
        for number in range(len(self._parameters)):
            if number not in nobodys:
                self._shards.delivered(number)

    def _current(self, steps: Steps) -> Pass:
        if self._pass is None:
            self._pass = Pass(steps.open(), self._device)
        return self._pass

    def _take(self, batch: Batch) -> None:
        if self._steps is not None:
            current = self._current(self._steps)
            as_they_lie = all(
                lies_like(gradient, self._homes[number]) for number, gradient in batch
            )
            if as_they_lie and self._steps.bring(current.step, batch):
                return
            marks = current.mark(gradient for _, gradient in batch)
            self._steps.hand_over(current.step, lambda: self._add(current, batch, marks))

    def _object(self, words: str) -> None:
        def refuse() -> None:
            raise ValueError(words)

        self._objected = words
        if self._steps is not None:
            self._steps.hand_over(self._current(self._steps).step, refuse)

    # ---- the worker's part ---------------------------------------------------------------------

    def _add(self, current: Pass, batch: Batch, marks: Marks) -> None:
        gradients = []
        for number, gradient in batch:
            image = current.image(gradient, self._homes[number], marks)
            gradients.append((number, image.numpy(), largest(self._parameters[number].dtype)))
        self._reducer.add_many(gradients)

    def _add_rest(self, current: Pass, rest: Batch, marks: Marks, unused: list[int]) -> None:
        """What was not taken early; zeros for parameters that have no gradient here."""
        self.taker.plan(self._reducer.buckets)
        if unused:
            self._reducer.participate(unused=unused)
        if self._device is None or not self._reducer.on_device:
            return self._add(current, rest, marks)
        current.wait_for(marks)
        with current.queued():
            for number, gradient in rest:
                whole = current.on_device(gradient, self._homes[number])
                self._device.hold([number], [whole.numel()], whole)
                self._reducer.add_on_device([number], largest(self._parameters[number].dtype))

    def _gradient(self, current: Pass, number: int) -> Tensor:
        parameter = self._parameters[number]
        if parameter.grad is not None:
            return self._shards.local(parameter.grad)
        local = self._shards.local(parameter)
        made = torch.zeros_like(self._homes[number], dtype=torch.float32, device=local.device)
        current.made[number] = flat(made)
        return made


class _Token:
    """Held by the callback at the end of a backward pass: a pass that is cut short drops it."""


def _end(adapter: "weakref.ref[ModuleAdapter]", token: _Token) -> None:
    del token
    alive = adapter()
    if alive is not None:
        alive.end()


class _ForwardHook:
    """Has the module's outputs tell when their gradients come.

    Inside of reentrant checkpoints, where the parameters' come, the engine calls back too early.
    """

    def __init__(self, adapter: "weakref.ref[ModuleAdapter]") -> None:
        self._adapter = adapter

    def __call__(self, module: torch.nn.Module, arguments: object, output: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or is_in_backward():
            return
        adapter = self._adapter
        if adapter() is None:
            return

        def begin(gradient: Tensor) -> None:
            alive = adapter()
            if alive is not None:
                alive.begin()

        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(begin)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # a copy does nothing
