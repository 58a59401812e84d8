"""Automatic mixed precision: scaled losses, what is owed kept without the factor."""

import gc
import warnings
from typing import Any

import pytest
import torch
from models import Dictated, attach_at_once, home, owed, rank_order_sum, small_integers
from processes import Rank, group
from scenarios import SCENARIOS, Actor, data
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

from topreduce.torch.optimizers import _listeners

SETTINGS: list[dict[str, Any]] = [
    {"method": "topk", "density": 0.01},
    {"method": "ok_topk", "density": 0.01, "granularity": "model"},
]
every_method = pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s["method"])


def scaler_of(scale: float) -> torch.amp.GradScaler:
    """Doubles after two good steps, halves after a bad one."""
    return torch.amp.GradScaler(
        home().type, init_scale=scale, growth_factor=2.0, backoff_factor=0.5, growth_interval=2
    )


def train(actor: Actor, scaler: torch.amp.GradScaler, step: int) -> None:
    actor.optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = actor.ddp(data(actor.rank, step))
    scaler.scale(loss).backward()
    scaler.unscale_(actor.optimizer)
    torch.nn.utils.clip_grad_norm_(actor.trained, 0.5)
    scaler.step(actor.optimizer)
    scaler.update()


def equal_plain_ddp(rank: Rank) -> None:
    actor, plain = Actor(rank, SCENARIOS["plain"]), Actor(rank, SCENARIOS["plain"])
    ours, theirs = scaler_of(64.0), scaler_of(64.0)
    attach_at_once(actor.ddp, "topk", density=1.0, scaler=ours)
    for step in range(6):
        train(actor, ours, step)
        train(plain, theirs, step)
    assert ours.get_scale() == theirs.get_scale() > 64
    torch.testing.assert_close(actor.weights(), plain.weights())


def test_density_one_is_plain_ddp() -> None:
    group(2).run(equal_plain_ddp)


def keep_memory_unscaled(rank: Rank, settings: dict[str, Any]) -> None:
    """The scale grows and backs off; debts and means are those of a run without it, exactly."""
    modules = [Dictated().to(home()) for _ in range(2)]
    models = [DistributedDataParallel(each, bucket_cap_mb=0.002) for each in modules]
    scaler = scaler_of(8.0)
    scaled = attach_at_once(models[0], scaler=scaler, **settings)
    plain = attach_at_once(models[1], **settings)
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.0)
    scales = []
    for step in range(9):
        scale = scaler.get_scale()
        scales.append(scale)
        gradients = small_integers(models[0].module, rank.rank, step)
        overflow = step == 4
        before = owed(scaled)
        optimizer.zero_grad()
        factor = float("inf") if overflow and rank.rank == 1 else 1.0
        loss = models[0]([gradient * factor for gradient in gradients])
        scaler.scale(loss).backward()
        if overflow:  # on rank 1 alone, and yet no rank moves
            assert torch.equal(owed(scaled), before)
            assert not scaled.stats()["finite"]
        else:
            models[1].zero_grad()
            models[1](gradients).backward()
            assert torch.equal(owed(scaled), owed(plain))
            flat = torch.cat([g.flatten().cpu() for g in gradients])
            settled = before + flat - owed(scaled)
            means = torch.cat([w.grad.flatten().cpu() for w in models[0].module.weights])
            assert torch.equal(means, rank_order_sum(settled) / rank.ranks * scale)
        scaler.step(optimizer)
        scaler.update()
    assert scales == [8, 8, 16, 16, 32, 16, 16, 32, 32]


@every_method
def test_memory_is_unscaled(settings: dict[str, Any]) -> None:
    group(2).run(keep_memory_unscaled, settings)


def different_scales(rank: Rank) -> None:
    """Messages hold unscaled values, so even ranks that disagree on the scale add up rightly."""
    ddp = DistributedDataParallel(Dictated())
    scaler = scaler_of(2.0 ** (3 + rank.rank))
    attach_at_once(ddp, "topk", density=1.0, scaler=scaler)
    gradients = small_integers(ddp.module, rank.rank, 0)
    scaler.scale(ddp(gradients)).backward()
    means = torch.cat([w.grad.flatten() for w in ddp.module.weights]) / scaler.get_scale()
    assert torch.equal(means, rank_order_sum(torch.cat([g.flatten() for g in gradients])) / 2)

    off = torch.amp.GradScaler("cpu", enabled=False)
    ddp = DistributedDataParallel(Dictated())
    attach_at_once(ddp, "topk", density=1.0, scaler=off)
    off.scale(ddp(gradients)).backward()
    assert torch.equal(torch.cat([w.grad.flatten() for w in ddp.module.weights]), means)
    with pytest.raises(ValueError, match="scaler must be a GradScaler, not float"):
        attach_at_once(DistributedDataParallel(Dictated()), scaler=1024.0)


def test_scales_that_differ_and_no_scale() -> None:
    group(2).run(different_scales)


# ---- a scaler that attach() was not told of ----------------------------------------------------


def warnings_of(
    ddp: DistributedDataParallel, scaler: torch.amp.GradScaler, **options: Any
) -> list[int]:
    """In each of three steps, how many warnings name the scaler."""
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.0, **options)
    counts = []
    for step in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.zero_grad()
            scaler.scale(ddp(small_integers(ddp.module, 0, step))).backward()
            scaler.step(optimizer)
            scaler.update()
        counts.append(sum("attach(..., scaler=" in str(each.message) for each in caught))
    return counts


def forget_the_scaler(rank: Rank) -> None:
    gc.collect()  # models of other tests
    earlier = set(_listeners)
    models = [DistributedDataParallel(Dictated()) for _ in range(3)]
    attached = [attach_at_once(model, density=0.1) for model in models]
    assert warnings_of(models[0], torch.amp.GradScaler("cpu", enabled=False)) == [0, 0, 0]
    assert warnings_of(DistributedDataParallel(Dictated()), scaler_of(8.0)) == [0, 0, 0]
    assert warnings_of(models[0], scaler_of(8.0)) == [1, 0, 0]
    assert warnings_of(models[0], scaler_of(8.0)) == [0, 0, 0]  # once
    assert warnings_of(models[1], scaler_of(8.0), fused=True) == [1, 0, 0]
    for sync in attached:
        sync.detach()
    assert warnings_of(models[2], scaler_of(8.0)) == [0, 0, 0]
    assert set(_listeners) <= earlier
    assert len(_global_optimizer_pre_hooks) == 1  # for all of them

    right = scaler_of(8.0)
    attach_at_once(models[2], density=0.1, scaler=right)
    assert warnings_of(models[2], right) == [0, 0, 0]
    assert warnings_of(models[2], scaler_of(8.0)) == [1, 0, 0]

    class Other:
        """Stands for a loss scaler that is not PyTorch's."""

        def get_scale(self) -> float:
            return 8.0

    odd = DistributedDataParallel(Dictated())
    attach_at_once(odd, density=0.1, scaler=Other())
    assert warnings_of(odd, scaler_of(8.0)) == [0, 0, 0]

    # One rank alone would add gradients of another unit to those of the others.
    alone = right if rank.rank == 1 else None
    with pytest.raises(ValueError, match=r"rank 0: no scaler.*rank 1: a scaler .*enabled=F"):
        attach_at_once(DistributedDataParallel(Dictated()), scaler=alone)


def test_a_scaler_that_was_not_given_is_reported() -> None:
    group(2).run(forget_the_scaler)
