"""How gradients lie in memory, and how the core sees them: flat, in fp32, in main memory."""

import contextlib
import functools
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from topreduce.torch.device import GradientDevice
from topreduce.torch.lane import MAIN_MEMORY, Lane, is_foreign
from topreduce.torch.steps import Step

Marks = dict[torch.device, torch.Event | None]  # where gradients are complete, by device


class Shards(Protocol):
    """What a rank holds of parameters and gradients: all, or a part."""

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part, in the same memory."""

    def gradient(self, parameter: torch.nn.Parameter, local: Tensor) -> Tensor:
        """A gradient of which this is the rank's part."""

    def objection(self) -> str:
        """Why the pass that begins cannot be averaged, if so."""

    def delivered(self, number: int) -> None:
        """The gradient of this parameter is now the mean over the ranks."""


class Whole:
    """Nothing is cut."""

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def gradient(self, parameter: torch.nn.Parameter, local: Tensor) -> Tensor:
        return local

    def objection(self) -> str:
        return ""

    def delivered(self, number: int) -> None:
        pass


class Pass:
    """A backward pass whose gradients are in the worker's hands, where they lie."""

    def __init__(self, step: Step, device: GradientDevice | None) -> None:
        self.step = step
        self.made: dict[int, Tensor] = {}  # flat means of parameters that have no gradient here
        self._copies: list[tuple[Tensor, Tensor]] = []  # gradients, and where their means are
        self._device = device
        self._lanes = {} if device is None else {device.device: device.lane}

    def mark(self, gradients: Iterable[Tensor]) -> Marks:
        """Called by the thread that computes: these gradients are complete from here on."""
        devices = {gradient.device for gradient in gradients}
        return {device: self._lane(device).mark() for device in devices if is_foreign(device)}

    def join(self) -> None:
        """What the calling thread asks of devices from now on waits for the worker's work."""
        for lane in self._lanes.values():
            lane.join()

    def wait_for(self, marks: Marks) -> None:
        """What the worker asks of devices from now on waits."""
        for device, mark in marks.items():
            with self._lane(device).behind(mark):
                pass

    def image(self, gradient: Tensor, home: Tensor, marks: Marks) -> Tensor:
        """For the core: the gradient's own memory where possible. `home`: how it is to lie."""
        if gradient.dtype == torch.float32 and not is_foreign(gradient.device):
            return self._in_order(gradient, home)
        lane = self._lane(gradient.device)
        with lane.behind(marks.get(gradient.device)):
            host = lane.to_host(gradient.float())
        image = torch.empty_like(home, dtype=torch.float32, device=MAIN_MEMORY).copy_(host)
        self._copies.append((gradient, image))
        return flat(image)

    def on_device(self, gradient: Tensor, home: Tensor) -> Tensor:
        """The same for a device that looks at it itself."""
        return self._in_order(gradient, home)

    def _in_order(self, gradient: Tensor, home: Tensor) -> Tensor:
        if lies_like(gradient, home):
            return flat(gradient)
        image = torch.empty_like(home, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
        self._copies.append((gradient, image))
        return flat(image)

    def _lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            self._lanes[device] = Lane(device)
        return self._lanes[device]

    # ---- when the step is over, see steps.Receiver ----

    def queued(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._device is None else self._device.lane.behind(None)

    def give_back(self) -> None:
        for gradient, image in self._copies:
            lane = self._lane(gradient.device)
            with lane.behind(None):
                gradient.copy_(image)

    def complete(self, error: Exception | None) -> None:
        if self._device is not None:
            self._device.release()
        self._copies.clear()


def flat(tensor: Tensor) -> Tensor:
    """Its memory, in one dimension."""
    if tensor.is_contiguous() and not tensor.requires_grad:
        return tensor.view(-1)
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def home_of(parameter: Tensor) -> Tensor:
    """Without memory: how gradients of a parameter lie in the layout, as it does if it is dense."""
    home = torch.empty_strided(parameter.shape, parameter.stride(), device="meta")
    return home if is_dense(parameter) else torch.empty(parameter.shape, device="meta")


def lies_like(gradient: Tensor, home: Tensor) -> bool:
    same = gradient.stride() == home.stride()
    return same or (gradient.is_contiguous() and home.is_contiguous())


def is_dense(tensor: Tensor) -> bool:
    """In some order of its axes, one entry lies behind the other."""
    return tensor.is_contiguous() or tensor.permute(_axes(tensor)).is_contiguous()


def stored_shape(parameter: Tensor) -> list[int]:
    """The shape in the order of memory, which is how gradients are laid out (channels_last)."""
    if parameter.is_contiguous() or not is_dense(parameter):
        return list(parameter.shape)
    return [parameter.shape[axis] for axis in _axes(parameter)]


def _axes(tensor: Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


@functools.cache
def largest(dtype: torch.dtype) -> float:
    """What memory of this type can hold of a mean that is computed in fp32."""
    return min(torch.finfo(each).max for each in (dtype, torch.float32))
