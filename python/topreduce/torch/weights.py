"""The same weights on all ranks before the first step, as DistributedDataParallel sees to it."""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from topreduce.torch.meeting import Ranks
from topreduce.torch.process_group import GroupCommunicator
from topreduce.torch.transfer import give


def make_equal(
    tensors: Sequence[Tensor], comm: GroupCommunicator, group: dist.ProcessGroup | Ranks
) -> None:
    """Those of the first rank of `group`, on all of them; sent only where they differ. Collective.

    `comm` has the same ranks.
    """
    words = comm.ask(" ".join(map(_fingerprint, tensors)))
    by_tensor = zip(*(word.split() for word in words), strict=True)
    pairs = zip(tensors, by_tensor, strict=True)
    different = [tensor for tensor, fingerprints in pairs if len(set(fingerprints)) > 1]
    if isinstance(group, Ranks):
        give(comm, 0, range(1, comm.size), different)
    else:
        first = dist.get_global_rank(group, 0)
        for tensor in different:
            whole = tensor.contiguous()
            dist.broadcast(whole, first, group=group)
            tensor.copy_(whole)


def _fingerprint(tensor: Tensor) -> str:
    memory = tensor.contiguous().cpu().reshape(-1).view(torch.uint8)
    return f"{zlib.crc32(memory.numpy().data):08x}"
