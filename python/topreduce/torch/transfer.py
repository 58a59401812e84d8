"""Tensors, and states of optimizers, from one rank to some others, over the connections of a group.

What travels is bytes of tensors, and JSON: nothing that is received can run.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topreduce import Communicator, WireError

_PIECE = 1 << 22  # bytes that travel at a time
_NOTHING = np.empty(0, np.uint8)


def give(
    comm: Communicator, source: int, targets: Sequence[int], tensors: Iterable[Tensor]
) -> None:
    """The tensors of `source` on `targets`, which have some of the same shapes. Collective."""
    tensors = [tensor.detach() for tensor in tensors]
    homes = [each if _lies_flat(each) else _copy(each) for each in tensors]
    for piece in _pieces(homes):
        size = sum(part.numel() for part in piece)
        counts = [0] * comm.size
        sent = _NOTHING
        if comm.rank == source:
            counts = [size if rank in targets else 0 for rank in range(comm.size)]
            sent = np.tile(torch.cat(piece).numpy(), len(targets))
        received, sizes = comm.all_to_all(sent, counts)
        if comm.rank not in targets:
            continue
        if sizes[source] != size:
            raise WireError(
                f"rank {source} sent {sizes[source]} bytes of its tensors, not {size}: the models "
                "of the ranks differ"
            )
        start = 0
        for part in piece:
            part.copy_(torch.from_numpy(received[start : start + part.numel()]))
            start += part.numel()
    if comm.rank in targets:
        for tensor, home in zip(tensors, homes, strict=True):
            if home is not tensor:
                tensor.copy_(home)


def give_states(
    comm: Communicator, source: int, targets: Sequence[int], owners: Sequence[Any]
) -> None:
    """The state_dict() of each owner on `source`, loaded by those on `targets`. Collective."""
    for owner in owners:
        tensors: list[Tensor] = []
        words = b""
        if comm.rank == source:
            words = json.dumps(_take_apart(owner.state_dict(), tensors)).encode()
        heard, counts = comm.all_gather(np.frombuffer(words, np.uint8))
        if counts[source] != heard.size:
            raise WireError(
                f"rank {source} alone may send the state of an optimizer, but others did too"
            )
        try:
            told = json.loads(heard.tobytes())
            if comm.rank != source:
                tensors = list(_empty(told))
        except (ValueError, LookupError, TypeError) as error:
            raise WireError(f"rank {source} sent no state of an optimizer: {error}") from None
        give(comm, source, targets, tensors)
        if comm.rank in targets:
            owner.load_state_dict(_put_together(told, tensors))


def _lies_flat(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and tensor.reshape(-1).stride() == (1,)


def _copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Their bytes, in order, in lists of about one length."""
    batch: list[Tensor] = []
    size = 0
    for tensor in tensors:
        for part in torch.split(tensor.reshape(-1).view(torch.uint8), _PIECE):
            if batch and size + part.numel() > _PIECE:
                yield batch
                batch, size = [], 0
            batch.append(part)
            size += part.numel()
    if size:
        yield batch


# ---- a state as JSON and tensors ---------------------------------------------------------------

_KINDS = {str(each): each for each in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}
_KINDS |= {str(each): each for each in (torch.int64, torch.int32, torch.uint8, torch.bool)}


def _take_apart(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        if str(value.dtype) not in _KINDS:
            raise ValueError(
                f"rebuild: a state holds a tensor of {value.dtype}, which cannot travel"
            )
        tensors.append(value)
        return {"tensor": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, dict):
        return {"dict": [[key, _take_apart(each, tensors)] for key, each in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_take_apart(each, tensors) for each in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"rebuild: a state holds a {type(value).__name__}, which cannot travel")


def _empty(told: Any) -> Iterator[Tensor]:
    """Tensors of the same shapes, in the same order."""
    if not isinstance(told, dict):
        return
    if "tensor" in told:
        yield torch.empty(told["shape"], dtype=_KINDS[told["tensor"]])
    for _, each in told.get("dict", ()):
        yield from _empty(each)
    for each in (*told.get("list", ()), *told.get("tuple", ())):
        yield from _empty(each)


def _put_together(told: Any, tensors: list[Tensor]) -> Any:
    """Takes the tensors from the front of the list."""
    if not isinstance(told, dict):
        return told
    if "tensor" in told:
        return tensors.pop(0)
    if "dict" in told:
        return {key: _put_together(each, tensors) for key, each in told["dict"]}
    kind = tuple if "tuple" in told else list
    return kind(_put_together(each, tensors) for each in told["tuple" if kind is tuple else "list"])
