"""Gradients on another device: main memory that is treated as if it were one.

What runs here is what would run on an accelerator, but for streams and pinned memory.
test_device.py has the details; here are real DDP models in real processes.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import test_amp
import test_attach
import test_ddp
import torch
from models import Run, attach_at_once
from processes import Rank, group
from scenarios import equal_plain_ddp, keep_the_laws

from topreduce.torch import lane

TOPK: dict[str, Any] = {"method": "topk", "density": 0.05, "values": "fp32"}
ARC: dict[str, Any] = {"method": "arc_topk", "density": 0.2}  # by way of main memory
TRAININGS: list[dict[str, Any]] = [
    TOPK | {"values": "bf16", "warmup_steps": 1, "ramp_steps": 4},
    TOPK | {"values": "int4", "granularity": "model"},
    TOPK | {"method": "ok_topk", "values": "bf16"},
    TOPK | {"feedback": "none"},
    ARC,
]


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    """Models that are attached in here are on another device."""
    lane.pretend = True
    try:
        yield
    finally:
        lane.pretend = False


# ---- the same training as in main memory -------------------------------------------------------


def same_training(rank: Rank, settings: dict[str, Any]) -> None:
    """Weights and states are the same, bit for bit; in the middle the two trade their states."""
    here, there = Run(rank, bucket_cap_mb=0.02), Run(rank, bucket_cap_mb=0.02)
    sync_here = attach_at_once(here.ddp, **settings)
    with pretending():
        sync_there = attach_at_once(there.ddp, **settings)
    assert sync_there._reducer.on_device == (settings != ARC)
    for steps in (range(4), range(4, 8)):
        here.train(steps)
        there.train(steps)
        saved_here, saved_there = sync_here.state_dict(), sync_there.state_dict()
        assert saved_here.keys() == saved_there.keys()
        for key, value in saved_here.items():
            other = saved_there[key]
            tensors = isinstance(value, torch.Tensor)
            assert torch.equal(value, other) if tensors else value == other, key
        sync_here.load_state_dict(saved_there)
        sync_there.load_state_dict(saved_here)
    assert there.digest() == here.digest()


@pytest.mark.parametrize("settings", TRAININGS, ids=str)
def test_the_same_training_as_in_main_memory(settings: dict[str, Any]) -> None:
    group(2).run(same_training, settings)


# ---- the rows that hold in main memory hold there ----------------------------------------------


def plain_ddp_there(rank: Rank) -> None:
    with pretending():
        equal_plain_ddp(rank, "unused parameters")
        test_attach.mixed_types(rank)


def test_density_one_is_plain_ddp_with_every_method() -> None:
    group(2).run(plain_ddp_there)


def laws_there(rank: Rank, settings: dict[str, Any]) -> None:
    with pretending():
        keep_the_laws(rank, "unused parameters", settings)
        keep_the_laws(rank, "gradients are views", settings)


@pytest.mark.parametrize("settings", [TOPK, TRAININGS[1], TRAININGS[2], ARC], ids=str)
def test_laws_on_a_device(settings: dict[str, Any]) -> None:
    group(3).run(laws_there, settings)


def scaled_and_joined_there(rank: Rank) -> None:
    with pretending():
        test_amp.keep_memory_unscaled(rank, TOPK)
        test_ddp.run_out_of_data(rank, False, TOPK)


def test_loss_scales_and_ranks_that_run_out_of_data() -> None:
    group(3).run(scaled_and_joined_there)


def use_another_default(rank: Rank) -> None:
    """torch.set_default_device("cuda") is common; "meta" stands for it."""
    here, there = Run(rank), Run(rank)
    with torch.device("meta"):
        sync = attach_at_once(here.ddp, **TOPK)
        with pretending():
            attach_at_once(there.ddp, **TOPK)
    for steps in (range(2), range(2, 4)):
        here.train(steps)
        there.train(steps)
        with torch.device("meta"):
            sync.load_state_dict(sync.state_dict())
    assert here.digest() == there.digest()


def test_another_device_may_be_the_default() -> None:
    group(2).run(use_another_default)


# ---- changing course ---------------------------------------------------------------------------


def change_course(rank: Rank) -> None:
    """Debts follow to main memory and back, and a rank there works with one in main memory."""
    runs = [Run(rank, bucket_cap_mb=0.02) for _ in range(2)]
    digests = []
    for run, everyone in zip(runs, (False, True), strict=True):
        with pretending() if everyone or rank.rank == 1 else contextlib.nullcontext():
            sync = attach_at_once(run.ddp, **TOPK)
            for step, method in enumerate(["topk", "arc_topk", "topk_dsa", "topk"]):
                sync.configure(method=method)
                run.train(range(2 * step, 2 * step + 2))
            sync.bypass()
            run.train(range(8, 10))
            sync.detach()
            run.train(range(10, 12))
        digests.append(run.digest())
    assert digests[0] == digests[1]


def test_changing_course_there() -> None:
    group(2).run(change_course)
