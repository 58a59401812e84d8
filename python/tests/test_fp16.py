"""Parameters in fp16: what is finite is decided on what DDP is handed, not on fp32 before it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Dictated, attach_at_once, owed, rank_order_sum
from processes import Rank, group
from torch.nn.parallel import DistributedDataParallel

SCALE = 1024.0
SETTINGS: list[dict[str, Any]] = [
    {"method": "topk", "density": 0.01, "values": "fp32"},
    {"method": "ok_topk", "density": 0.05, "granularity": "model"},
    {"method": "arc_topk", "density": 0.03},
    {"method": "randk", "density": 0.05},
]


def keep_the_law(rank: Rank, settings: dict[str, Any], machines: bool) -> None:
    """Debts grow by 10 a step; times the loss scale they leave fp16 behind after six."""
    ddp = DistributedDataParallel(Dictated((torch.float16,)), bucket_cap_mb=0.002)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
    if machines:
        hosts = [dist.new_group([0]), dist.new_group([1])]
        settings = {**settings, "local_group": hosts[rank.rank]}
    sync = attach_at_once(ddp, scaler=scaler, **settings)
    gradients = [torch.full_like(w, 10.0 + rank.rank) for w in ddp.module.weights]
    flat = torch.cat([g.flatten().float() for g in gradients])
    lost = 0
    for _ in range(12):
        ddp.zero_grad()
        before, scale = owed(sync), scaler.get_scale()
        scaler.scale(ddp(gradients)).backward()
        means = torch.cat([w.grad.flatten().float() for w in ddp.module.weights])
        finite = sync.stats()["finite"]
        assert finite == bool(means.isfinite().all()), "DDP's memory holds what was decided on"
        if finite:
            settled = rank_order_sum(before + flat - owed(sync)) / rank.ranks
            torch.testing.assert_close(means / scale, settled, rtol=2e-3, atol=1e-3)
        else:
            lost += 1
            assert torch.equal(owed(sync), before), "a step that is skipped delivers nothing"
            scaler.update(scale / 2)  # torch itself unscales no fp16 gradients
    assert lost > 0, "no step left fp16 behind: this test shows nothing"
    assert scaler.get_scale() == SCALE / 2**lost
    sync.detach()


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s["method"])
def test_nothing_is_lost_where_fp16_ends(settings: dict[str, Any]) -> None:
    group(2).run(keep_the_law, settings, False)


def test_nothing_is_lost_between_machines() -> None:
    group(2).run(keep_the_law, SETTINGS[0], True)


def join_early(rank: Rank) -> None:
    """A rank that has joined still has the scale it left with, and must decide as the others do."""
    ddp = DistributedDataParallel(Dictated((torch.float16,)), bucket_cap_mb=0.002)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
    sync = attach_at_once(ddp, scaler=scaler, density=0.01)
    gradients = [torch.full_like(w, 10.0) for w in ddp.module.weights]
    with ddp.join():
        for _ in range(3 if rank.rank == 1 else 14):
            ddp.zero_grad()
            scaler.scale(ddp(gradients)).backward()
            if not sync.stats()["finite"]:
                scaler.update(scaler.get_scale() / 2)
    steps = [entry["step"] for entry in sync.history() if entry["finite"]]
    everyone: list[Any] = [None] * rank.ranks
    dist.all_gather_object(everyone, steps)
    assert everyone[0] == everyone[1], "the same steps went through"
    assert len(steps) < 14, "no step left fp16 behind: this test shows nothing"
    sync.detach()


def test_ranks_that_have_joined_decide_alike() -> None:
    group(2).run(join_early)
