"""Sharded models: a host holds a replica, each of its ranks a shard; fast inside, slow between."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

NATIVE = ("noop", "dense", "bf16")  # FSDP's own ways: no mean between hosts, and HSDP


def mesh_of(model: nn.Module, shards: int) -> DeviceMesh:
    """Replicas by shards; the ranks of a host stand next to each other. Collective."""
    return _mesh(next(model.parameters()).device.type, dist.get_world_size() // shards, shards)


@functools.cache
def _mesh(kind: str, hosts: int, shards: int) -> DeviceMesh:
    return init_device_mesh(kind, (hosts, shards), mesh_dim_names=("replicate", "shard"))


def shard_natively(model: nn.Module, shards: int, name: str) -> nn.Module:
    """FSDP alone; in "noop" nobody averages between the hosts."""
    mesh = mesh_of(model, shards)
    if name == "noop":
        return shard(model, mesh["shard"])
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if name == "bf16" else None)
    return shard(model, mesh, mp_policy=policy)


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """The model itself, cut: by its blocks if it has any."""
    blocks = getattr(model, "blocks", ())
    for block in blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model
