"""Several ranks per machine, gradients on accelerators: added up where they lie.

What holds in main memory (test_two_levels.py) holds there too.
"""

from pathlib import Path
from unittest import mock

import fakegpu
import models
import pytest
import test_two_levels as levels
import torch
import torch.distributed as dist
from accelerators import is_fake, on_device
from models import Dictated, Run, attach_at_once, digest, small_integers
from processes import Rank, accelerated
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from topreduce.torch import device_group
from topreduce.torch.machine_device import MachineDevice

TOPK, ARC = levels.SETTINGS[0], levels.SETTINGS[3]
UNEVEN = [[0, 1, 2], [3]]
NATIVE = {"method": "randk", "density": 0.1, "reduce": "native"}  # of two, in any order


def compute(rank: Rank) -> None:
    """Bit for bit a run of one rank per machine, in main memory, on the machines' means."""
    with on_device():
        for settings in (TOPK, ARC, NATIVE):
            levels.equal_machine_means(rank, levels.TWO_BY_TWO, settings)
        with mock.patch.object(device_group, "_PIECE", 1000):
            levels.equal_machine_means(rank, UNEVEN, TOPK)
        levels.equal_flat(rank)
        levels.be_one_machine(rank)


@pytest.mark.long
def test_it_is_a_run_of_one_rank_per_machine() -> None:
    accelerated(4).run(compute)


def use(rank: Rank) -> None:
    with on_device():
        levels.keep_the_laws(rank, "unused parameters", levels.TWO_BY_TWO)
        levels.keep_the_laws(rank, "gradients are views", UNEVEN)
        levels.run_out_of_data(rank, False)
        round_once(rank)


def round_once(rank: Rank) -> None:
    """Gradients of other types are added up in fp32; each rank's loss scale is its own affair."""
    mixed = (torch.float32, torch.bfloat16, torch.float16)
    for dtypes, scale in ((mixed, 1.0), ((torch.float32,), 2.0**rank.rank)):
        ddp = DistributedDataParallel(Dictated(dtypes).to(models.place))
        scaler = mock.Mock(get_scale=lambda scale=scale: scale)
        levels.attach(rank, ddp, method="topk", density=1.0, scaler=scaler)
        everyone = [small_integers(ddp.module, other, 0) for other in range(rank.ranks)]
        ddp([gradient * scale for gradient in everyone[rank.rank]]).backward()
        for weight, *gradients in zip(ddp.module.weights, *everyone, strict=True):
            mean = sum(gradient.float() for gradient in gradients) / rank.ranks * scale
            assert torch.equal(weight.grad, mean.to(weight.dtype))


def test_laws_joins_scales_and_types() -> None:
    accelerated(4).run(use)


def fail(rank: Rank, broken: int, part: str) -> str:
    with on_device():
        return levels.break_down(rank, broken, part)


@pytest.mark.parametrize(
    ("broken", "part"), [(1, "inside"), pytest.param(2, "between", marks=pytest.mark.long)]
)
def test_one_broken_rank_stops_all_machines(broken: int, part: str) -> None:
    for message in accelerated(4).run(fail, broken, part):
        assert "the cable is cut" in message, message


def resume(rank: Rank, folder: str) -> None:
    with on_device():
        levels.interrupted(rank, TOPK, folder)


@pytest.mark.long
def test_resume_is_exact(tmp_path: Path) -> None:
    accelerated(4).run(resume, str(tmp_path))


def equal_the_cpu(rank: Rank) -> None:
    """Also with the delegates' chosen entries as the only thing that leaves the devices."""
    machine, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    with sdpa_kernel(SDPBackend.MATH):
        here = Run(rank)
        with on_device():
            there = Run(rank)
            syncs = []
            for run in (here, there):
                syncs.append(attach_at_once(run.ddp, local_group=machine, **TOPK))
                run.train(range(3))
            assert isinstance(syncs[1]._reducer._device, MachineDevice)
            there.optimizer.zero_grad()
            loss = there.ddp(models.text(rank.rank, 3).to(models.place))
            fakegpu.load().reset_counters()
            loss.backward()
            counted = fakegpu.counters()
            here.backward(3)
    assert digest(there.mean_gradient()) == digest(here.mean_gradient())
    assert there.digest() == here.digest()
    sizes = [syncs[place].stats()["bytes_inside"] for place in (0, 1)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)
    entries = sum(each.numel() for each in there.ddp.parameters())
    if rank.rank % 2:
        assert counted.get("bytes_to_host", 0) == 0
        assert counted.get("stops", 0) == 0
    else:  # beside what was chosen, a sample of this small model is all of it
        assert 0 < counted["bytes_to_host"] < 3 * 4 * entries


@pytest.mark.skipif(not is_fake(), reason="counts, and the CPU's order of sums")
def test_only_delegates_bring_anything_to_main_memory() -> None:
    accelerated(4).run(equal_the_cpu)
