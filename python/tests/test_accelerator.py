"""Models on an accelerator: one that tests bring along (fakegpu), or `--device cuda`.

test_device.py has the details; here are real DDP models in real processes.
"""

import contextlib
import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import fakegpu
import models
import pytest
import test_amp
import test_attach
import test_ddp
import torch
import torch.distributed as dist
from accelerators import by_copy, check_order, is_fake, name, on_device
from models import Run, attach_at_once, digest, flat, made_at_home, owed, text
from processes import Rank, accelerated
from scenarios import equal_plain_ddp, keep_the_laws
from torch.nn.attention import SDPBackend, sdpa_kernel

from topreduce.lab.experiments.methods import parse_methods
from topreduce.lab.experiments.race import RaceOptions, race_rank
from topreduce.lab.tasks.models import Workload, check_device
from topreduce.torch import CommError, WireError
from topreduce.torch.device import GradientDevice
from topreduce.torch.device_group import DeviceGroup

TOPK: dict[str, Any] = {"method": "topk", "density": 0.05, "values": "fp32"}
ARC: dict[str, Any] = {"method": "arc_topk", "density": 0.2}  # by way of main memory
TRAININGS: list[dict[str, Any]] = [
    TOPK | {"values": "bf16", "warmup_steps": 1, "ramp_steps": 4},
    TOPK | {"values": "int4", "granularity": "model"},
    TOPK | {"method": "ok_topk", "values": "bf16"},
    TOPK | {"feedback": "none"},
    ARC,
]
RANDK: dict[str, Any] = {"method": "randk", "density": 0.05, "reduce": "native"}
NATIVE: list[dict[str, Any]] = [
    ARC | {"reduce": "native"},
    RANDK | {"keep_dense": "*bias"},
    {"method": "dense", "feedback": "residual", "reduce": "native"},
]


# ---- the same training as in main memory -------------------------------------------------------


def same_training(rank: Rank, settings: dict[str, Any]) -> None:
    """Weights and states are the same, bit for bit; in the middle the two trade their states."""
    with on_device():
        train_both(rank, settings)


def train_both(rank: Rank, settings: dict[str, Any]) -> None:
    here, there = Run(rank, bucket_cap_mb=0.02), Run(rank, bucket_cap_mb=0.02)
    with by_copy():
        sync_here = attach_at_once(here.ddp, **settings)
    sync_there = attach_at_once(there.ddp, **settings)
    assert not sync_here._reducer.on_device
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


@pytest.mark.parametrize("settings", [*TRAININGS, *NATIVE], ids=str)
def test_the_same_training_as_in_main_memory(settings: dict[str, Any]) -> None:
    accelerated(2).run(same_training, settings)


def train_on_the_cpu(rank: Rank, settings: dict[str, Any]) -> None:
    """Kernels of our device are the CPU's."""
    with sdpa_kernel(SDPBackend.MATH):
        here = Run(rank)
        with on_device():
            there = Run(rank)
            for run in (here, there):
                attach_at_once(run.ddp, **settings)
                run.train(range(5))
    assert there.losses == here.losses
    assert there.digest() == here.digest()


@pytest.mark.skipif(not is_fake(), reason="other devices add in other orders")
def test_the_same_training_as_on_the_cpu() -> None:
    accelerated(2).run(train_on_the_cpu, TRAININGS[0])


# ---- reduce=native -----------------------------------------------------------------------------


def stay_there(rank: Rank) -> None:
    """All-reduces between devices: of gradients no entry comes to main memory, nor goes back."""
    for settings in NATIVE:
        with on_device():
            run = Run(rank)
            sync = attach_at_once(run.ddp, granularity="model", **settings)
            run.train(range(2))
            run.optimizer.zero_grad()
            loss = run.ddp(text(rank.rank, 2).to(models.place))
            fakegpu.load().reset_counters()
            loss.backward()
            counted = fakegpu.counters()
        entries = sync.stats()["entries"]
        exchanges = 2 if "keep_dense" in settings else 1
        assert counted["stops"] <= exchanges + 1, counted  # one for the statistics
        assert counted["bytes_to_host"] < 200
        assert counted.get("bytes_to_device", 0) < 0.4 * 4 * entries  # directions, places


@pytest.mark.skipif(not is_fake(), reason="counts")
def test_native_sums_never_leave_the_device() -> None:
    accelerated(2).run(stay_there)


def lose_an_all_reduce(rank: Rank) -> None:
    """Nobody has committed; another group of the same ranks goes on."""
    with on_device():
        run = Run(rank, bucket_cap_mb=0.02)
        sync = attach_at_once(run.ddp, **NATIVE[0])
        run.train(range(2))
        before = owed(sync)
        cut = mock.Mock(side_effect=CommError("the cable is cut"))
        place = mock.patch.object(DeviceGroup, "all_reduce", cut)
        cutting = place if rank.rank == 1 else contextlib.nullcontext()
        with cutting, pytest.raises((CommError, WireError)):
            run.backward(2)
        assert torch.equal(owed(sync), before)
        assert run.mean_gradient().count_nonzero() == 0
        if is_fake():
            assert all("work failed" in each for each in fakegpu.take_races())
        sync.rebuild(dist.new_group(), optimizer=run.optimizer)
        run.train(range(2, 4))
        assert sync._reducer.on_device
    digests: list[Any] = [None] * rank.ranks
    dist.all_gather_object(digests, run.digest())
    assert len(set(digests)) == 1


def test_a_native_all_reduce_that_fails() -> None:
    accelerated(2).run(lose_an_all_reduce)


# ---- a rank that is killed ---------------------------------------------------------------------


def lose_a_rank(rank: Rank, settings: dict[str, Any], phase: str) -> Any:
    """Rank 2 is killed in the middle of a step; the others make a group of their own, and go on."""
    with on_device():
        run = Run(rank, bucket_cap_mb=0.02)
        sync = attach_at_once(run.ddp, **settings)
        run.train(range(3))
        before, model = owed(sync), run.digest()
        if rank.rank == 2:
            sync._comm.fail_at(0, "killed", phase, how="kill")  # type: ignore[arg-type]
        with pytest.raises(CommError, match="rank 2 is gone"):
            run.backward(3)
        assert torch.equal(owed(sync), before)
        assert run.digest() == model
        left = dist.new_group([0, 1], use_local_synchronization=True)
        rebuilt = sync.rebuild(left, optimizer=run.optimizer)
        assert (rebuilt.step, rebuilt.lost, rebuilt.late, rebuilt.joined) == (3, 1, [], [])
        run.train(range(3, 8))
        assert sync._reducer.on_device
    return sync.step, run.digest()


@pytest.mark.parametrize(("settings", "phase"), [(TOPK, "exchange"), (RANDK, "vote")], ids=str)
def test_those_who_are_left_go_on(settings: dict[str, Any], phase: str) -> None:
    results = accelerated(3).run(lose_a_rank, settings, phase, dying=[2])[:2]
    assert results[0] == results[1]
    assert results[0][0] == 8


# ---- the rows that hold in main memory hold there ----------------------------------------------


def plain_ddp_there(rank: Rank) -> None:
    with on_device():
        equal_plain_ddp(rank, "unused parameters")
        test_attach.mixed_types(rank)


def test_density_one_is_plain_ddp_with_every_method() -> None:
    accelerated(2).run(plain_ddp_there)


def laws_there(rank: Rank, settings: dict[str, Any]) -> None:
    with on_device():
        keep_the_laws(rank, "unused parameters", settings)
        keep_the_laws(rank, "gradients are views", settings)


@pytest.mark.parametrize(
    "settings",
    [
        *(TOPK, TRAININGS[2], RANDK),
        *(pytest.param(each, marks=pytest.mark.long) for each in (TRAININGS[1], ARC, NATIVE[0])),
    ],
    ids=str,
)
def test_laws_on_a_device(settings: dict[str, Any]) -> None:
    accelerated(3).run(laws_there, settings)


def scaled_and_joined_there(rank: Rank) -> None:
    with on_device():
        test_amp.keep_memory_unscaled(rank, TOPK)
        test_ddp.run_out_of_data(rank, False, TOPK)


def test_loss_scales_and_ranks_that_run_out_of_data() -> None:
    accelerated(3).run(scaled_and_joined_there)


def mixed_precision(rank: Rank) -> None:
    """Autocast and a GradScaler that begins too high, as people have them: the bits of a copy."""
    with on_device():
        found = []
        for how in (by_copy(), contextlib.nullcontext()):
            run, scaler = Run(rank), torch.amp.GradScaler(name(), 2.0**26, growth_interval=3)
            with how:
                sync = attach_at_once(run.ddp, scaler=scaler, **TOPK)
            for step in range(8):
                run.optimizer.zero_grad()
                with torch.autocast(name(), torch.float16):
                    loss = run.ddp(text(rank.rank, step).to(models.place))
                scaler.scale(loss).backward()
                scaler.unscale_(run.optimizer)
                torch.nn.utils.clip_grad_norm_(run.ddp.parameters(), 1.0)
                scaler.step(run.optimizer)
                scaler.update()
            assert 8 < scaler.get_scale() < 2.0**26, "of 8 steps some went through"
            found.append((run.digest(), digest(owed(sync)), scaler.get_scale()))
        assert found[0] == found[1]


def test_mixed_precision() -> None:
    accelerated(2).run(mixed_precision)


def use_another_default(rank: Rank) -> None:
    """torch.set_default_device("cuda") is common; "meta" stands for it."""
    with on_device():
        here, there = Run(rank), Run(rank)
        sync_here = attach_at_once(here.ddp, **TOPK)
        with torch.device("meta"):
            sync = attach_at_once(there.ddp, **TOPK)
        for steps in (range(2), range(2, 4)):
            here.train(steps)
            there.train(steps)
            with torch.device("meta"):
                sync.load_state_dict(sync_here.state_dict())
        assert here.digest() == there.digest()


def test_another_device_may_be_the_default() -> None:
    accelerated(2).run(use_another_default)


# ---- changing course ---------------------------------------------------------------------------


def change_course(rank: Rank) -> None:
    """Debts follow to main memory and back; a rank there works with one in main memory."""
    for everyone in (False, True):
        mine = take_turns(rank, everyone or rank.rank == 1)
        digests: list[Any] = [None] * rank.ranks
        dist.all_gather_object(digests, mine)
        assert len(set(digests)) == 1 or not is_fake()


def take_turns(rank: Rank, there: bool) -> str:
    """Without DDP, which has all ranks on devices of one kind."""
    with on_device() if there else contextlib.nullcontext():
        model, place = made_at_home(), models.place
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sync = attach_at_once(model, group=dist.group.WORLD, **TOPK)
        for step in range(10):
            method = ["topk", "arc_topk", "topk_dsa", "topk", "bypass"][step // 2]
            sync.bypass() if method == "bypass" else sync.configure(method=method)
            optimizer.zero_grad()
            model(text(rank.rank, step).to(place)).backward()
            optimizer.step()
        return digest(flat(model, lambda parameter: parameter.detach()))


def test_changing_course_there() -> None:
    accelerated(2).run(change_course)


# ---- errors ------------------------------------------------------------------------------------


def fail_once(rank: Rank) -> None:
    """A device that is full on one rank: both raise, and nobody has committed."""
    with on_device():
        run = Run(rank, bucket_cap_mb=0.02)
        sync = attach_at_once(run.ddp, **TOPK)
        run.train(range(2))
        before = owed(sync)
        full = mock.Mock(side_effect=torch.OutOfMemoryError("full"))
        place = mock.patch.object(GradientDevice, "strongest", full)
        expected = torch.OutOfMemoryError if rank.rank == 1 else CommError
        with place if rank.rank == 1 else contextlib.nullcontext(), pytest.raises(expected):
            run.backward(2)
        assert torch.equal(owed(sync), before)
        assert run.mean_gradient().count_nonzero() == 0


def test_errors_leave_the_device_as_it_was() -> None:
    accelerated(2).run(fail_once)


# ---- groups, and the lab -----------------------------------------------------------------------


def use_a_group_of_the_device_alone(rank: Rank) -> None:
    """As with NCCL, whose groups know nothing of main memory."""
    with on_device():
        run = Run(rank, process_group=dist.new_group(backend=fakegpu.BACKEND))
        sync = attach_at_once(run.ddp, **TOPK)
        run.train(range(3))
    assert sync._reducer.on_device
    digests: list[Any] = [None] * rank.ranks
    dist.all_gather_object(digests, run.digest())
    assert len(set(digests)) == 1


@pytest.mark.skipif(not is_fake(), reason="NCCL wants a device for each rank")
def test_a_group_of_the_device_alone() -> None:
    accelerated(2).run(use_a_group_of_the_device_alone)


def test_the_suite_takes_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """./run test python -- --device cuda: its word is no file."""
    monkeypatch.chdir(Path(__file__).parents[2])
    assert pytest.Config.fromdictargs({}, ["--device", "cuda"]).getoption("--device") == "cuda"


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, words in ((None, "no accelerator"), (torch.device("cuda"), "4 ranks need")):
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda found=found, **_: found
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        with pytest.raises(ValueError, match=words):
            check_device("cuda", "nccl", 4)
    check_device("cuda", "nccl", 2)
    check_device("cuda", "gloo", 4)


def race(rank: Rank, shards: int) -> None:
    workload = Workload(model="gpt:0.6m", batch=1, context=16, device=name(), shards=shards)
    methods = parse_methods("noop,dense,topk:density=0.01", shards)
    options = RaceOptions(workload=workload, methods=methods, rounds=1, steps=1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for parameters, steps, _ in race_rank(rank.rank, rank.ranks, options, lambda turn: None):
        assert parameters > 500_000
        assert len(steps) == 1
        assert math.isfinite(steps[0].loss)
    check_order()


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_race_on_the_device(shards: int) -> None:
    accelerated(2).run(race, shards)
