"""The order of work on a gradient's device, between backward() and the worker.

CUDA does later what it is told now. So the hook marks where a gradient is complete, the worker
queues its work behind the mark on a stream of its own, and DDP's future waits for that stream.
Other accelerators are waited for at both ends; main memory needs nothing of this.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.futures import Future

MAIN_MEMORY = torch.device("cpu")

pretend = False  # tests set it: main memory is treated as if it were another device's


def is_foreign(device: torch.device) -> bool:
    """Whether the core cannot look into this device's memory."""
    return pretend or device.type != "cpu"


class Lane:
    """Where the worker's operations on one device are queued."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._foreign = is_foreign(device)
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def future(self) -> Future[torch.Tensor]:
        """For a tensor of this device. DDP's stream waits for the one that completes it."""
        return Future() if self._stream is None else Future(devices=[self._device])

    def mark(self) -> Any:
        """Called by the thread that computes: everything it has asked for until now."""
        if self._stream is not None:
            return torch.cuda.current_stream(self._device).record_event()
        return self._wait_for_all()

    @contextlib.contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """The worker's work, behind `mark`."""
        if self._stream is None:
            yield
            self._wait_for_all()
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """In main memory once this returns; the tensor itself if it lives there."""
        if self._stream is not None:
            host = torch.empty(
                tensor.shape, dtype=tensor.dtype, device=MAIN_MEMORY, pin_memory=True
            )
            host.copy_(tensor, non_blocking=True)
            self._stream.synchronize()
            return host
        return tensor.to(MAIN_MEMORY, copy=self._foreign)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of memory that the caller may change once this returns."""
        if self._stream is not None:
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device, copy=True)

    def _wait_for_all(self) -> None:
        if self._device.type != "cpu":
            getattr(torch, self._device.type).synchronize()
