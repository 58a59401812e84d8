"""The order of work on a gradient's device, between backward() and the worker.

An accelerator does later what it is told now. So the hook marks where a gradient is complete, the
worker queues its work behind the mark on a stream of its own, and DDP's future waits for that
stream. A device without streams is waited for at both ends; main memory needs nothing of this.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.futures import Future

MAIN_MEMORY = torch.device("cpu")
_NOTHING = contextlib.nullcontext()


def is_foreign(device: torch.device) -> bool:
    """Whether the core cannot look into this device's memory."""
    return device.type != "cpu"


class Lane:
    """Where the worker's operations on one device are queued."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _urgent_stream(device)

    def future(self) -> Future[torch.Tensor]:
        """For a tensor of this device. DDP's stream waits for the one that completes it."""
        return Future() if self._stream is None else Future(devices=[self._stream.device])

    def mark(self) -> torch.Event | None:
        """Called by the thread that computes: everything it has asked for until now."""
        if self._stream is not None:
            return torch.accelerator.current_stream(self._device).record_event()
        self._wait_for_all()
        return None

    def behind(self, mark: torch.Event | None) -> contextlib.AbstractContextManager[None]:
        """The worker's work, behind `mark`."""
        return self._behind(mark) if is_foreign(self._device) else _NOTHING

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """The worker's work, behind all marks so far."""
        return _NOTHING if self._stream is None else self._entered()

    @contextlib.contextmanager
    def _behind(self, mark: torch.Event | None) -> Iterator[None]:
        if self._stream is None:
            yield
            self._wait_for_all()
            return
        with self._entered():
            if mark is not None:
                self._stream.wait_event(mark)
            yield

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        assert self._stream is not None
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def join(self) -> None:
        """What the calling thread asks for from now on waits for the worker's work."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """In main memory once this returns; the tensor itself if it lives there."""
        if self._stream is None:
            return tensor.to(MAIN_MEMORY)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device=MAIN_MEMORY, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.accelerator.current_stream(self._device).record_event().synchronize()
        return host

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of memory that the caller may change once this returns."""
        if self._stream is None:
            return tensor.to(self._device, copy=True)
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _wait_for_all(self) -> None:
        if is_foreign(self._device):
            torch.accelerator.synchronize(self._device)


def read_later(value: torch.Tensor) -> Callable[[], float]:
    """A number on a device. Nobody waits before it is asked for."""
    host = torch.empty((), dtype=value.dtype, device=MAIN_MEMORY, pin_memory=True)
    host.copy_(value.detach().reshape(()), non_blocking=True)
    mark = torch.accelerator.current_stream(value.device).record_event()

    def read() -> float:
        mark.synchronize()
        return float(host)

    return read


def _urgent_stream(device: torch.device) -> torch.Stream | None:
    """Of high priority: what it does is little, and the network waits for it."""
    if device.type == "cpu":
        return None
    try:
        return torch.Stream(device, priority=-1)
    except RuntimeError:  # has no streams
        return None
