"""Takes gradients as they become ready, while the backward pass goes on.

A hook of each parameter is called whenever something was added to its gradient: once in a backward
pass, or more often (reentrant checkpoints with static_graph). How often is learnt from the first
pass, and the gradient is taken at the last call. Where that is not sure to be all, the adapter
(ddp.py, module.py) takes it when its framework says that it is complete:

- a parameter that was called another number of times in another pass, or changed after it;
- one with further post-accumulate hooks, which may change the gradient;
- gradients on an accelerator, and those that do not lie in memory as their parameter does, or
  whose sign torch has yet to turn.
"""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Batch = list[tuple[int, Tensor]]  # numbers of parameters, and their gradients

_NOT_SURE = -1  # how often a parameter is called


class Taker:
    """Of the parameters of one model. Adapters say when a pass begins and ends."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        hand_over: Callable[[Batch], None],
        object_to: Callable[[str], None],
        local: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        arrive: Callable[[], None] = lambda: None,
    ) -> None:
        """`parameters`: by name, in the layout's order. `hand_over` gets gradients that will not
        change any more, in the order they came. `object_to` is told of one that changed all the
        same: its step must not go through. Both are called inside of backward() and must not
        raise. `local`: what this rank holds of a parameter or a gradient. `arrive` is called before
        every gradient, and may begin a pass.
        """
        self._hand_over, self._object_to = hand_over, object_to
        self._local, self._arrive = local, arrive
        self._names = list(parameters)
        held = [local(parameter) for parameter in parameters.values()]
        self._strides = [tensor.stride() for tensor in held]
        self._plain = [tensor.is_contiguous() for tensor in held]
        self._calls = [0] * len(parameters)  # in a pass, as learnt; 0: not yet known
        self.used = bytearray(len(parameters))  # 1: called since `forget_use`
        self.open = False  # in a pass, or before one
        self.learnt = False  # a pass was seen from its beginning to its end
        self.order: dict[int, None] = {}  # parameters, as they came in this pass
        self._called = [0] * len(parameters)  # in this pass
        self._takes = False  # in this pass
        self._may_keep: Collection[int] = ()  # in this pass
        self.kept: set[int] = set()  # in this pass: nobody else has these gradients
        self._seen: dict[int, tuple[Tensor, int]] = {}  # gradients and their versions
        self._taken: set[int] = set()
        self._batch: Batch = []
        self._plan: tuple[list[int], list[int]] = [0] * len(parameters), [len(parameters)]
        self._bucket_of, self._missing = self._plan
        handles = []
        for number, parameter in enumerate(parameters.values()):
            listen = parameter.register_post_accumulate_grad_hook
            handles.append(listen(TakerHook(weakref.ref(self), number)))  # type: ignore[no-untyped-call]
        self._remove_hooks = weakref.finalize(self, _remove, handles)

    def plan(self, buckets: Sequence[Sequence[int]]) -> None:
        """From the next pass on: gradients of these parameters are of use together."""
        bucket_of = [0] * len(self._calls)
        for place, bucket in enumerate(buckets):
            for number in bucket:
                bucket_of[number] = place
        self._plan = bucket_of, [len(bucket) for bucket in buckets]

    def begin(self, *, takes: bool, may_keep: Collection[int] = ()) -> None:
        """A pass whose gradients are averaged may come. `takes`: else they are only counted.
        `may_keep`: parameters whose gradient may be taken away from them.
        """
        self.open, self._takes, self._may_keep = True, takes, may_keep
        self._called = [0] * len(self._calls)
        self._bucket_of, sizes = self._plan
        self._missing = list(sizes)
        self.order = {}
        self._seen.clear()
        self._taken.clear()
        self.kept = set()
        self._batch = []

    def end(self) -> None:
        """Every parameter was complete."""
        self.flush()
        self.open, self.learnt = False, True
        self._seen.clear()
        self._taken.clear()

    @property
    def idle(self) -> bool:
        """No parameter was called in this pass."""
        return not any(self._called)

    def was_taken(self, number: int) -> bool:
        """In this pass."""
        return number in self._taken

    def forget_use(self) -> None:
        self.used[:] = bytes(len(self.used))

    def release(self) -> None:
        self._remove_hooks()
        self.open = False

    def flush(self) -> None:
        """Hands over what was taken."""
        if self._batch:
            batch, self._batch = self._batch, []
            self._hand_over(batch)

    def complete(self, numbers: Iterable[int]) -> None:
        """The framework says that nothing more is added to these parameters in this pass."""
        for number in numbers:
            seen, calls = self._seen.pop(number, None), self._called[number]
            changed = seen is not None and seen[0]._version != seen[1]
            if number in self._taken:
                if changed:
                    self._object(number)
                continue
            if changed or (calls and self._calls[number] not in (0, calls)):
                self._calls[number] = _NOT_SURE
            elif calls and self._calls[number] == 0:
                self._calls[number] = calls
            if self._calls[number] != calls:
                self.order.pop(number, None)
            self.order.setdefault(number)

    def called(self, number: int, parameter: torch.nn.Parameter) -> None:
        """By the hook, for every gradient: it takes about a microsecond."""
        self._arrive()
        self.used[number] = 1
        if not self.open:
            return
        calls = self._called[number] = self._called[number] + 1
        wanted = self._calls[number]
        if number in self._taken:
            return self._object(number)
        if wanted == _NOT_SURE or calls < wanted:
            return
        found = parameter.grad
        if found is None:
            return
        gradient = self._local(found)
        if not self._is_fit(number, parameter, gradient):
            return
        is_view = gradient._is_view()
        if not is_view:  # else it has its version in common with the whole bucket
            self._seen[number] = gradient, gradient._version
        self.order.pop(number, None)
        self.order[number] = None
        if calls == wanted and self._takes:
            self._taken.add(number)
            self._batch.append((number, gradient))
            if number in self._may_keep and not is_view:
                parameter.grad = None
                self.kept.add(number)
            bucket = self._bucket_of[number]
            self._missing[bucket] -= 1
            if self._missing[bucket] <= 0:
                self.flush()

    def _is_fit(self, number: int, parameter: torch.nn.Parameter, gradient: Tensor) -> bool:
        hooks = parameter._post_accumulate_grad_hooks
        if len(hooks) > 1 and any(type(hook) is not TakerHook for hook in hooks.values()):
            return False
        if not gradient.is_cpu or gradient.layout is not torch.strided or gradient.is_neg():
            return False
        return gradient.stride() == self._strides[number] or (
            self._plain[number] and gradient.is_contiguous()
        )

    def _object(self, number: int) -> None:
        self._calls[number] = _NOT_SURE
        self._object_to(
            f"the gradient of {self._names[number]} changed after it was taken; in earlier "
            "backward passes it was complete by then. Change gradients in hooks that were "
            "registered by register_post_accumulate_grad_hook: those are waited for"
        )


class TakerHook:
    """Of one parameter, which owns it."""

    __slots__ = "_number", "taker"

    def __init__(self, taker: "weakref.ref[Taker]", number: int) -> None:
        self.taker, self._number = taker, number

    def __call__(self, parameter: torch.nn.Parameter) -> None:
        taker = self.taker()
        if taker is not None:
            taker.called(self._number, parameter)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # a copy does nothing


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
