"""The same weights on all ranks before the first step, as DistributedDataParallel sees to it."""

import json
import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from topreduce.torch.process_group import GroupCommunicator


def make_equal(
    tensors: Mapping[str, Tensor], comm: GroupCommunicator, group: dist.ProcessGroup
) -> None:
    """Those of the first rank of `group`, on all of them; sent only where they differ. Collective.

    `comm` has the same ranks. ValueError, on all of them, if their tensors are not of a kind.
    """
    own = [(name, _kind(each), _fingerprint(each)) for name, each in tensors.items()]
    everyone = [json.loads(word) for word in comm.ask(json.dumps(own))]
    described = [[f"{name} {kind}" for name, kind, _ in each] for each in everyone]
    difference = _difference(described, dist.get_process_group_ranks(group))
    comm.concur(difference or "alike")
    if difference:
        raise ValueError(difference)
    first = dist.get_global_rank(group, 0)
    for number, tensor in enumerate(tensors.values()):
        if len({each[number][2] for each in everyone}) > 1:
            whole = tensor.contiguous()
            dist.broadcast(whole, first, group=group)
            tensor.copy_(whole)


def _difference(everyone: list[list[str]], ranks: list[int]) -> str:
    for rank, other in zip(ranks, everyone, strict=True):
        if other != everyone[0]:
            for mine, theirs in zip([*everyone[0], "none"], [*other, "none"], strict=False):
                if mine != theirs:
                    return (
                        "frozen parameters and buffers must be the same on all ranks, as trained "
                        f"ones: where rank {ranks[0]} has {mine}, rank {rank} has {theirs}"
                    )
    return ""


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")


def _fingerprint(tensor: Tensor) -> str:
    memory = tensor.contiguous().cpu().reshape(-1).view(torch.uint8)
    return f"{zlib.crc32(memory.numpy().data):08x}"
