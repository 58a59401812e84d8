"""Plain averages over a process group of the user's, by its own all-reduce: after detach()."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from topreduce.torch.gradients import Shards

_AT_A_TIME = 25 << 20  # bytes


def average(
    parameters: Sequence[torch.nn.Parameter],
    used: Sequence[int],
    shards: Shards,
    group: dist.ProcessGroup,
) -> set[int]:
    """Replaces gradients by their means over the ranks. `used`: 1 for those that this rank used.

    What any rank used gets a gradient on all of them. Returns the others.
    """
    if not parameters:
        return set()
    flags = torch.tensor(list(used), dtype=torch.int32, device=shards.local(parameters[0]).device)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    wanted = [bool(flag) for flag in flags.tolist()]
    gradients = []
    for parameter, is_wanted in zip(parameters, wanted, strict=True):
        if is_wanted:
            if parameter.grad is None:
                zeros = torch.zeros_like(shards.local(parameter).detach())
                parameter.grad = shards.gradient(parameter, zeros)
            gradients.append(shards.local(parameter.grad))
    for part in _parts(gradients):
        together = torch.cat([each.reshape(-1) for each in part])
        dist.all_reduce(together, group=group)
        together /= group.size()
        for each, mean in zip(part, torch.split(together, [p.numel() for p in part]), strict=True):
            each.copy_(mean.view(each.shape))
    return {number for number, is_wanted in enumerate(wanted) if not is_wanted}


def _parts(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Of one type and device, and not too large; the same on all ranks."""
    part: list[Tensor] = []
    size = 0
    for each in gradients:
        bytes_ = each.numel() * each.element_size()
        alike = not part or (part[0].dtype, part[0].device) == (each.dtype, each.device)
        if part and (not alike or size + bytes_ > _AT_A_TIME):
            yield part
            part, size = [], 0
        part.append(each)
        size += bytes_
    if part:
        yield part
