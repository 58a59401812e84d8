"""The drift alarm: a fingerprint of the parameters, compared over the ranks every few steps."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from topreduce._core import fingerprint

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

    def look(self) -> int:
        """A fingerprint of the parameters as they are."""
        return fingerprint_of(map(self._local, self._parameters))

    def fingerprint(self, step: int) -> int | None:
        """Of the parameters; None if this step does not compare them."""
        if not self._every or step % self._every:
            return None
        return self.look()
