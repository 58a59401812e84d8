"""The drift alarm: a fingerprint of the parameters, compared over the ranks every few steps."""

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from topreduce._core import fingerprint
from topreduce.torch.lane import Lane, is_foreign

_PIECE = 1 << 24  # bytes that come from an accelerator at a time


def fingerprint_of(tensors: Iterable[Tensor]) -> int:
    """Of their bits, in this order."""
    found = 0
    for tensor in tensors:
        memory = bytes_of(tensor)
        pieces = [memory] if memory.is_cpu else torch.split(memory, _PIECE)
        for piece in pieces:
            found = fingerprint(piece.cpu().numpy(), found)
    return found


def bytes_of(tensor: Tensor) -> Tensor:
    """Its memory, or that of a copy if it does not lie in one piece."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.stride() != (1,):  # of a single entry it may be anything
        flat = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device).copy_(flat)
    return flat.view(torch.uint8)


class Verifier:
    """Says in which steps the ranks compare their parameters, and what they have."""

    def __init__(
        self, parameters: Iterable[Tensor], local: Callable[[Tensor], Tensor], every: int
    ) -> None:
        """`parameters` in one order on all ranks; `local`: what this rank holds of one. `every`: 0
        for never.
        """
        self._parameters = list(parameters)
        self._local = local
        self._every = every
        devices = {local(each).device for each in self._parameters} if every else set()
        self._lanes = [Lane(device) for device in devices if is_foreign(device)]

    def look(self) -> int:
        """A fingerprint of the parameters as they are."""
        return fingerprint_of(map(self._local, self._parameters))

    def mark(self) -> Callable[[int], int | None]:
        """Called by the thread that computes: the parameters are complete. What this returns is for
        the worker, with the number of the step: a fingerprint, None if it does not compare them.
        """
        marks = [lane.mark() for lane in self._lanes]

        def fingerprint_in(step: int) -> int | None:
            if not self._every or step % self._every:
                return None
            with contextlib.ExitStack() as queued:
                for lane, mark in zip(self._lanes, marks, strict=True):
                    queued.enter_context(lane.behind(mark))
                return self.look()

        return fingerprint_in
