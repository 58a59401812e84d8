"""Sharded models that attach() refuses, with what to do instead; all ranks are told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Rank, group, kept
from sharded import Case, Model, attach, build, mesh_of, usual_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import topreduce.torch


def refused(
    make: Callable[[], nn.Module], words: str, error: type = ValueError, **how: Any
) -> None:
    with pytest.raises(error, match=words):
        topreduce.torch.attach(make(), "topk", **how)


def refuse(rank: Rank) -> None:
    mesh = mesh_of(2, 2)
    replicas = mesh["replicate"]

    def plain() -> nn.Module:
        return build(Case(), mesh["shard"])

    # A mesh of two dimensions: FSDP averages densely as well.
    refused(
        lambda: build(Case(), mesh), r"mesh of 2 dimensions.*mesh\['shard'\]", replicas=replicas
    )
    # No replicas.
    refused(plain, r"leave it to FSDP")
    refused(plain, r"hold the same shard, and ranks .* are not", replicas=mesh["shard"])
    refused(plain, r"hold the same shard, and ranks", replicas=dist.group.WORLD)
    refused(plain, "mesh of one dimension, not of 2", replicas=mesh)
    refused(plain, "must be a DeviceMesh or a process group", TypeError, replicas=2)
    refused(plain, "group= is for modules that are not sharded", group=dist.group.WORLD)

    # Only the blocks are sharded, or less than all.
    def blocks_only() -> nn.Module:
        model = Model()
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        return model

    refused(blocks_only, r"no root of it: call fully_shard", replicas=replicas)
    refused(blocks_only, r"blocks.0 is a FSDPModule", group=dist.group.WORLD)

    def ignored() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return fully_shard(model, mesh=mesh["shard"], ignored_params={model[0].bias})

    refused(ignored, r"0\.bias is trained but not sharded", replicas=replicas)

    # A compiled root, and parts of a root that is attached.
    refused(
        lambda: torch.compile(plain(), backend="eager"),
        r"attach\(model\._orig_mod",
        replicas=replicas,
    )
    whole = plain()
    outer = attach(whole, mesh)
    refused(lambda: whole.blocks[0], r"scale is averaged already.*attach once", replicas=replicas)
    usual_step(whole, outer, 0)

    # Replicas with other buffers, on all shards or on one: all ranks are told.
    for culprits in ((2, 3), (3,)):
        model = nn.Linear(4, 4)
        model.register_buffer("seen", torch.zeros(2 if rank.rank in culprits else 1))
        fully_shard(model, mesh=mesh["shard"])
        words = r"rank 1 has seen float32 \(1,\), rank 3 has seen float32 \(2,\)"
        refused(lambda model=model: model, words, replicas=replicas)

    # Meshes that are mixed.
    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    kept.extend(everyone.get_all_groups())

    def mixed() -> nn.Module:
        model = Model()
        fully_shard(model.blocks[1], mesh=everyone)
        return fully_shard(model, mesh=mesh["shard"])

    refused(mixed, r"sharded over other ranks than", replicas=replicas)

    # An optimizer in the backward pass, before and after attach().
    def hooked() -> nn.Module:
        model = plain()
        model.blocks[2].up.weight.register_post_accumulate_grad_hook(lambda p: None)
        return model

    refused(
        hooked, r"blocks\.2\.up\.weight has a post-accumulate hook.*optimizer", replicas=replicas
    )
    model = plain()
    sync = attach(model, mesh)
    with pytest.raises(ValueError, match="attached already"):
        attach(model, mesh)
    model.blocks[0].scale.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match=r"blocks\.0\.scale has a post-accumulate hook"):
        usual_step(model, sync, 0)
    sync.detach()

    # Parameters that were replaced.
    model = plain()
    attach(model, mesh)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match="is another parameter than at attach"):
        usual_step(model, sync, 0)

    # FSDP of the first generation.
    pair = mesh.get_group("shard")
    refused(
        lambda: FullyShardedDataParallel(
            nn.Linear(4, 4), process_group=pair, device_id=torch.device("cpu")
        ),
        r"FSDP2 \(fully_shard\) with replicas=",
        TypeError,
    )

    # One rank alone: the others, of all shards, are told.
    with pytest.raises(ValueError, match=r"attached already|nothing was|differ|post-accumulate"):
        topreduce.torch.attach(hooked() if rank.rank == 1 else plain(), "topk", replicas=replicas)
    again = plain()
    sync = attach(again, mesh)
    usual_step(again, sync, 0)

    # Also before it is connected.
    dist.barrier()
    if rank.rank != 1:
        sync.detach()
    dist.barrier()
    with pytest.raises(ValueError, match=r"attached already: detach") as refusal:
        attach(again, mesh)
    assert (rank.rank == 1) != str(refusal.value).startswith("nothing was changed, on any rank")
    sync.detach()
    dist.barrier()
    sync = attach(again, mesh, density=0.1)
    usual_step(again, sync, 1)
    assert len(sync.history()) == 1


def test_refusals() -> None:
    group(4).run(refuse)


def tensor_parallel(rank: Rank) -> None:
    """Norms are on both ranks of `tp`, and would drift apart."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    kept.extend(mesh.get_all_groups())
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    with pytest.raises(ValueError, match=r"1\.weight is also cut or copied.*drift apart"):
        topreduce.torch.attach(model, replicas=mesh["replicate"])
    model = fully_shard(nn.Linear(4, 4), mesh=mesh["shard"])  # on both ranks of `tp`, unseen
    with pytest.raises(ValueError, match=r"\(replicate, shard, tp\) with more ranks.*get_group"):
        topreduce.torch.attach(model, replicas=mesh["replicate"])


def pipeline(rank: Rank) -> None:
    """Stages on the ranks of a replica; their gradients come outside of backward()."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "stage"))
    kept.extend(mesh.get_all_groups())
    torch.manual_seed(1)
    number = mesh.get_local_rank("stage")
    module = fully_shard(nn.Linear(4, 4), mesh=mesh["shard"])
    sync = topreduce.torch.attach(module, replicas=mesh.get_group("replicate"))
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.MSELoss())
    x = torch.ones(4, 4)
    with pytest.raises(Exception, match="pipeline schedules"):
        schedule.step(x) if number == 0 else schedule.step(target=x)
    assert not sync.history()


def test_tensor_parallelism() -> None:
    group(4).run(tensor_parallel)


def test_pipelines() -> None:
    group(4).run(pipeline)
