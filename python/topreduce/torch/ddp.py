"""Gradients of a DistributedDataParallel model, and the way their means take into its buckets.

DDP copies each gradient into a bucket, and calls a hook for every bucket that is full, before it
waits for any of the futures. By then most gradients were taken (taker.py), and are on their way;
the hook tells where they lie now, and hands over those that were not. The futures are completed
together, once the last bucket is through.
"""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from topreduce import Reducer
from topreduce.torch.averager import Averager
from topreduce.torch.device import GradientDevice
from topreduce.torch.gradients import flat, largest
from topreduce.torch.lane import Lane
from topreduce.torch.steps import Step, Steps, is_in_backward
from topreduce.torch.taker import Batch, Taker


class _Contents:
    """Which parameters lie in a bucket of DDP; the same ones in most steps."""

    def __init__(self, parameters: list[Tensor], numbers: Mapping[int, int]) -> None:
        """`numbers`: of parameters in the layout, by `id`."""
        self.parameters = parameters
        self.found = [numbers.get(id(each)) for each in parameters]  # None: of none there
        self.known = [number for number in self.found if number is not None]
        self.sizes = [each.numel() for each in parameters]
        self.ends = list(itertools.accumulate(self.sizes))

    @property
    def numbers(self) -> list[int]:
        if None in self.found:
            unknown = self.parameters[self.found.index(None)]
            raise ValueError(
                f"DDP reduces a parameter of shape {tuple(unknown.shape)} that was not there at "
                "attach(): wrap the model in a new DistributedDataParallel and attach again"
            )
        return self.known


class _Bucket:
    """A bucket of DDP in the worker's hands. The memory belongs to DDP."""

    def __init__(self, bucket: GradBucket, contents: _Contents, lane: Lane) -> None:
        self.future = lane.future()
        self.buffer = bucket.buffer()
        self._lane, self._computed = lane, lane.mark()
        self.contents = contents
        self.is_first = bucket.index() == 0
        self.is_last = bucket.is_last()
        self.unused: list[int] = []
        self.most = largest(self.buffer.dtype)
        self._copies: list[tuple[Tensor, Tensor]] = []  # parts of the buffer, and their means

    def gradient(self, start: int, end: int) -> Tensor:
        """Part of it as the core wants it: DDP's own memory where possible."""
        part = self.buffer[start:end]
        with self.queued():
            float32 = self._lane.to_host(part.float())
        if float32.data_ptr() != part.data_ptr():
            self.bring(float32, start, end)
        return float32

    def bring(self, float32: Tensor, start: int, end: int) -> None:
        """That part of it will be copied from here."""
        self._copies.append((self.buffer[start:end], float32))

    def queued(self) -> contextlib.AbstractContextManager[None]:
        """Work on the device, behind what computed the gradient."""
        return self._lane.behind(self._computed)

    def give_back(self) -> None:
        if self._copies:
            with self.queued():
                for part, float32 in self._copies:
                    part.copy_(float32, non_blocking=True)

    def complete(self, error: Exception | None) -> None:
        """Lets DDP go on with what the buffer holds; after an error, with zeros."""
        with self.queued():
            if error is not None:
                self.buffer.zero_()
        with self.queued():
            self.future.set_result(self.buffer)


class _Pass:
    """A backward pass, or what a rank that has joined does in its place."""

    def __init__(self, step: Step, device: GradientDevice | None, learns: bool) -> None:
        self.step = step
        self.learns = learns  # how often, and in which order, parameters are called
        self.buckets: list[_Bucket] = []
        self.taken: dict[int, Tensor] = {}  # before their buckets were full, in fp32
        self.lent: dict[int, Tensor] = {}  # that their parameters are without; in buckets are zeros
        self._owners: list[tuple[Tensor, Tensor]] = []  # of these: parameters and gradients
        self._device = device

    def queued(self) -> contextlib.AbstractContextManager[None]:
        return self.buckets[-1].queued()

    def find_owners(self, contents: _Contents) -> None:
        """Of gradients that are lent."""
        for number, parameter in zip(contents.numbers, contents.parameters, strict=True):
            if number in self.lent:
                self._owners.append((parameter, self.lent[number]))

    def give_back(self) -> None:
        for bucket in self.buckets:
            bucket.give_back()

    def complete(self, error: Exception | None) -> None:
        if self._device is not None:
            self._device.release()
        for parameter, gradient in self._owners:
            parameter.grad = gradient  # DDP writes the mean into it
        self._owners.clear()
        self.lent.clear()
        self.taken.clear()
        for bucket in self.buckets:
            bucket.complete(error)
        self.buckets.clear()


class DDPAdapter:
    """Serves DDP's hook. DDP owns what owns this, so nothing here leads back to DDP."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        steps: Steps,
        reducer: Averager,
        parameters: Mapping[str, torch.nn.Parameter],
        device: GradientDevice | None,
    ) -> None:
        """`parameters`: those that DDP reduces, in the layout's order. `device`: the one that the
        reducer uses.
        """
        self._steps = steps
        self._reducer = reducer
        self._numbers = {id(each): number for number, each in enumerate(parameters.values())}
        self._device = device
        self._lanes = {} if device is None else {device.device: device.lane}
        # The ranks of a machine add up whole buckets of DDP; a Reducer takes what is ready before.
        self._flat = reducer if isinstance(reducer, Reducer) else None
        self._takes_early = self._flat is not None and device is None
        self._may_be_unused = bool(ddp.find_unused_parameters or ddp.static_graph)
        # DDP must expect to find no gradient, and have memory of its own for the mean.
        self._may_keep = not self._may_be_unused and not ddp.gradient_as_bucket_view
        self._ddp = weakref.ref(ddp)
        self._pass: _Pass | None = None
        self._learns = False  # from the next pass
        self._taker = Taker(parameters, self._take, self._object)
        self._taker.plan(reducer.buckets)
        self._parameters = list(parameters.values())
        self._contents: dict[tuple[int, ...], _Contents] = {}  # by the ids of parameters
        self._handle = ddp.register_forward_hook(_ForwardHook(weakref.ref(self)))

    def release(self) -> None:
        self._handle.remove()
        self._taker.release()

    def forward(self) -> None:
        """DDP's forward pass is over. Decides, as DDP does, if the next backward is averaged."""
        ddp = self._ddp()
        if ddp is None or not (torch.is_grad_enabled() and ddp.require_backward_grad_sync):
            return
        in_buckets = self._takes_early and self._reducer.spec["granularity"] == "bucket"
        self._learns = in_buckets and not self._taker.learnt
        takes = in_buckets and self._taker.learnt
        self._taker.begin(takes=takes, may_keep=self._new_gradients() if takes else ())
        self._pass = None  # one that user code cut short

    def _new_gradients(self) -> set[int]:
        """Parameters whose gradients backward() will make, so that nobody else has them."""
        if not (self._may_keep and self._flat is not None and self._flat.borrows):
            return set()
        return {number for number, each in enumerate(self._parameters) if each.grad is None}

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """DDP's hook. Never raises inside backward(): that would break DDP's next step."""
        contents = self._contents_of(bucket)
        full = _Bucket(bucket, contents, self._lane(bucket.buffer().device))
        if full.is_first and self._pass is not None:  # with static_graph the first pass has several
            again = any(each.contents is contents for each in self._pass.buckets)
            if again or not is_in_backward():
                self._pass = None
        current = self._open()
        current.buckets.append(full)
        come = sum(len(each.contents.parameters) for each in current.buckets)
        full.is_last = full.is_last or come >= len(self._parameters)
        step = current.step
        if step.in_backward and self._may_be_unused:
            used = self._taker.used
            full.unused = [each for each in contents.known if not used[each]]
        if self._taker.open and step.in_backward:
            self._taker.complete(contents.known)
            self._taker.flush()
            if full.is_last:
                self._taker.end()
        self._steps.hand_over(step, functools.partial(self._add, current, full))
        if full.is_last:
            self._close(current)
        return full.future

    def _contents_of(self, bucket: GradBucket) -> _Contents:
        parameters = bucket.parameters()
        ids = tuple(map(id, parameters))
        if ids not in self._contents:
            if bucket.index() == 0:  # DDP may have cut them anew
                self._contents.clear()
            self._contents[ids] = _Contents(parameters, self._numbers)
        return self._contents[ids]

    def _open(self) -> _Pass:
        if self._pass is None:
            step = self._steps.open()
            learns = self._learns and self._taker.open and step.in_backward
            self._pass = _Pass(step, self._device, learns)
        return self._pass

    def _close(self, current: _Pass) -> None:
        step = current.step
        if current.learns:
            order = list(self._taker.order)
            self._steps.hand_over(step, lambda: self._add_all(current, order))
        if step.in_backward:
            self._taker.forget_use()
            _raise_at_the_end_of_backward(step)
        self._pass = None
        self._steps.close(step, current)
        if not step.in_backward:  # a rank that has joined early
            step.over.wait()
            if step.error is not None:
                raise step.error.with_traceback(None)

    # ---- what the taker says, inside of backward() ---------------------------------------------

    def _take(self, batch: Batch) -> None:
        current = self._open()
        kept = self._taker.kept
        if self._steps.bring(current.step, batch, kept):
            current.taken.update(batch)
            current.lent.update(each for each in batch if each[0] in kept)
        else:
            self._steps.hand_over(current.step, lambda: self._add_early(current, batch, kept))

    def _object(self, words: str) -> None:
        def refuse() -> None:
            raise ValueError(words)

        self._steps.hand_over(self._open().step, refuse)

    # ---- the worker's part ---------------------------------------------------------------------

    def _add_early(self, current: _Pass, batch: Batch, kept: Collection[int]) -> None:
        """Gradients where autograd put them, of any floating type."""
        for ours, run in itertools.groupby(batch, lambda each: each[0] in kept):
            gradients = []
            for number, gradient in run:
                float32 = current.taken[number] = flat(gradient).float()
                gradients.append((number, float32.numpy(), largest(gradient.dtype)))
                if ours:
                    current.lent[number] = gradient
            assert self._flat is not None
            self._flat.add_many(gradients, ours)

    def _add(self, current: _Pass, bucket: _Bucket) -> None:
        """What is in the bucket and was not taken; what was goes where it lies now."""
        if bucket.is_first:
            self._taker.plan(self._reducer.buckets)
        if bucket.unused:
            self._reducer.participate(unused=bucket.unused)
        contents = bucket.contents
        numbers = contents.numbers
        if self._device is not None and self._reducer.on_device:
            with bucket.queued():
                self._device.hold(numbers, contents.sizes, bucket.buffer)
                self._reducer.add_on_device(numbers, bucket.most)
            return
        if current.learns:
            return
        current.find_owners(contents)
        if bucket.buffer.dtype == torch.float32 and current.lent.keys() >= set(numbers):
            assert self._flat is not None
            return self._flat.deliver_to(numbers, bucket.gradient(0, contents.ends[-1]).numpy())
        places = zip(numbers, contents.sizes, contents.ends, strict=True)
        for early, run in itertools.groupby(places, lambda place: place[0] in current.taken):
            parts = list(run)
            group = [number for number, _, _ in parts]
            start, end = parts[0][2] - parts[0][1], parts[-1][2]
            if not early:
                self._reducer.add(group, bucket.gradient(start, end).numpy(), bucket.most)
            elif bucket.buffer.dtype == torch.float32:
                self._tell_places(current, parts, bucket)
            else:
                for number, size, last in parts:
                    bucket.bring(flat(current.taken[number]), last - size, last)

    def _tell_places(
        self, current: _Pass, places: list[tuple[int, int, int]], bucket: _Bucket
    ) -> None:
        """Where in the bucket the means go: `places` are numbers, sizes and ends."""
        for lent, run in itertools.groupby(places, lambda place: place[0] in current.lent):
            parts = list(run)
            group = [number for number, _, _ in parts]
            means = bucket.gradient(parts[0][2] - parts[0][1], parts[-1][2]).numpy()
            assert self._flat is not None
            (self._flat.deliver_to if lent else self._flat.relocate)(group, means)

    def _add_all(self, current: _Pass, order: list[int]) -> None:
        """In the order in which they came, which the reducer learns."""
        found = {}
        for bucket in current.buckets:
            array = bucket.gradient(0, bucket.buffer.numel()).numpy()
            contents = bucket.contents
            places = zip(contents.numbers, contents.sizes, contents.ends, strict=True)
            for number, size, end in places:
                found[number] = number, array[end - size : end], bucket.most
        assert self._flat is not None
        self._flat.add_many([found[number] for number in order])

    def _lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            self._lanes[device] = Lane(device)
        return self._lanes[device]


class _ForwardHook:
    """Called after DDP's forward pass."""

    def __init__(self, adapter: "weakref.ref[DDPAdapter]") -> None:
        self._adapter = adapter

    def __call__(self, module: torch.nn.Module, arguments: object, output: object) -> None:
        adapter = self._adapter()
        if adapter is not None:
            adapter.forward()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # a copy does nothing


def _raise_at_the_end_of_backward(step: Step) -> None:
    """Has backward() raise the step's error, once DDP has finished."""
    engine = torch.autograd.Variable._execution_engine

    def raise_error() -> None:
        if step.error is not None:
            raise step.error.with_traceback(None)

    # Two levels: callbacks run in the order they came, and DDP's own is still to come.
    engine.queue_callback(lambda: engine.queue_callback(raise_error))
