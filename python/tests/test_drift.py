"""verify_every: ranks that drifted are named on all ranks, before anything is committed."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Run, attach_at_once, digest
from processes import Rank, group
from sharded import Case, build, mesh_of, usual_step
from sharded import attach as attach_shards

import topreduce.torch
from topreduce.torch import CommError, DriftError, Sync

EVERY = 2
SETTINGS = {"method": "topk", "density": 0.01, "verify_every": EVERY}


def bend(parameter: torch.nn.Parameter) -> None:
    """As a bit that flips in memory does."""
    with torch.no_grad():
        parameter.view(-1)[3] += 1e-6


def state_of(sync: Sync) -> dict[str, Any]:
    return {
        key: digest(value) if isinstance(value, torch.Tensor) else value
        for key, value in sync.state_dict().items()
    }


def over_ddp(rank: Rank, odd: int, **settings: Any) -> tuple[str, int]:
    run = Run(rank, bucket_cap_mb=0.03)
    sync = attach_at_once(run.ddp, **SETTINGS, **settings)
    run.train(range(EVERY + 1))
    if rank.rank == odd:
        bend(run.ddp.module.blocks[0].up.weight)
    run.train(range(EVERY + 1, 2 * EVERY))  # not yet compared
    before = state_of(sync)
    with pytest.raises((DriftError, CommError)) as raised:
        run.backward(2 * EVERY)
    assert state_of(sync) == before
    assert not run.mean_gradient().any()
    return f"{raised.typename}: {raised.value}", sync._reducer.step


def on_two_machines(rank: Rank, odd: int) -> tuple[str, int]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return over_ddp(rank, odd, local_group=groups[rank.rank // 2])


def of_a_module(rank: Rank, odd: int) -> str:
    model = torch.nn.Linear(30, 20)
    sync = topreduce.torch.attach(model, "topk", group=dist.group.WORLD, verify_every=1)
    if rank.rank == odd:
        bend(model.weight)
    with pytest.raises(DriftError) as raised:
        model(torch.ones(30)).sum().backward()
    del sync
    return str(raised.value)


def of_replicas(rank: Rank, odd: int) -> str:
    mesh = mesh_of(2, 2)
    root = build(Case(), mesh["shard"])
    sync: Sync = attach_shards(root, mesh, "topk", density=0.1, verify_every=1)
    usual_step(root, sync, 0)
    if rank.rank == odd:
        with torch.no_grad():
            next(iter(root.parameters())).to_local().view(-1)[0] += 1
    with pytest.raises((DriftError, CommError)) as raised:
        usual_step(root, sync, 1)
    return f"{raised.typename}: {raised.value}"


def in_other_steps(rank: Rank) -> str:
    with pytest.raises(ValueError, match="verify_every") as raised:
        attach_at_once(Run(rank).ddp, "topk", verify_every=2 + rank.rank // 2)
    with pytest.raises(ValueError, match="verify_every must be a number of steps, not -1"):
        attach_at_once(Run(rank).ddp, "topk", verify_every=-1)
    return str(raised.value)


def test_ddp() -> None:
    for told, step in group(4).run(over_ddp, 2):
        assert told.startswith(
            "DriftError: step 4: the ranks have drifted apart: rank 2 has other parameters than "
            "ranks 0, 1, 3"
        )
        assert step == 4


def test_machines() -> None:
    inside = [told for told, _ in group(4).run(on_two_machines, 3)]
    # Rank 2 speaks for its machine; rank 3 is found by it, and the other machine hears of it.
    assert all("rank 3 has other parameters than rank 2" in told for told in inside)
    assert [told.split(":")[0] for told in inside[2:]] == ["DriftError"] * 2


def test_modules() -> None:
    words = group(4).run(of_a_module, 1)
    assert all("rank 1 has other parameters than ranks 0, 2, 3" in told for told in words)


def test_replicas() -> None:
    words = group(4).run(of_replicas, 3)
    assert all("rank 3 has other parameters than rank 1" in words[rank] for rank in (1, 3))
    assert all(told.startswith(("DriftError", "CommError")) for told in words)


def test_ranks_that_verify_in_other_steps_are_refused() -> None:
    for told in group(4).run(in_other_steps):
        assert "rank 0: no scaler, verify_every=2" in told


def test_what_is_alike_is_not_reported() -> None:
    group(4).run(train_in_peace)


def train_in_peace(rank: Rank) -> None:
    run = Run(rank, bucket_cap_mb=0.03)
    plain = Run(rank, bucket_cap_mb=0.03)
    sync = attach_at_once(run.ddp, "topk", density=0.01, verify_every=1)
    other = attach_at_once(plain.ddp, "topk", density=0.01)
    run.train(range(6))
    plain.train(range(6))
    assert run.digest() == plain.digest()
    assert sync.stats()["rounds"] == other.stats()["rounds"]
    assert sync.stats()["bytes_sent"] == other.stats()["bytes_sent"]
