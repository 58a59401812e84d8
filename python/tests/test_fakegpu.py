"""The device that tests bring along bites: what is not ordered, or not waited for, is poison."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

import accelerators
import fakegpu
import models
import pytest
import torch
import torch.distributed as dist
from models import Run, attach_at_once
from processes import Rank, accelerated
from torch import Tensor, nn

from topreduce.torch.lane import MAIN_MEMORY, Lane

pytestmark = pytest.mark.skipif(not accelerators.is_fake(), reason="of fakegpu alone")


def keep_the_host_out(rank: Rank) -> None:
    tensor = torch.ones(5, device=fakegpu.NAME)
    child = os.fork()
    if child == 0:
        ctypes.string_at(tensor.data_ptr(), 4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGSEGV


def order_by_events(rank: Rank) -> None:
    side = torch.Stream(fakegpu.NAME)
    ones = torch.ones(1000, device=fakegpu.NAME)
    with side:
        early = ones * 2
    assert "aten::mul" in fakegpu.take_races()[0]
    assert early.isnan().all().item()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        late = ones * 2
    torch.accelerator.current_stream().wait_stream(side)
    assert late.sum().item() == 2000
    assert not fakegpu.take_races()
    late += 1
    with side:
        late += 1
    assert "aten::add" in fakegpu.take_races()[0]


def bring_when_waited_for(rank: Rank) -> None:
    host = torch.zeros(5, pin_memory=True)
    host.copy_(torch.ones(5, device=fakegpu.NAME), non_blocking=True)
    done = torch.accelerator.current_stream().record_event()
    assert host.isnan().all()
    done.synchronize()
    assert host.sum() == 5
    before = fakegpu.counters()["stops"]
    host.to(fakegpu.NAME, non_blocking=True)
    assert fakegpu.counters()["stops"] == before
    host.to(fakegpu.NAME)
    assert fakegpu.counters()["stops"] == before + 1


def free_in_order(rank: Rank) -> None:
    side = torch.Stream(fakegpu.NAME)
    for kept in (True, False):
        tensor = torch.ones(100_000, device=fakegpu.NAME)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            tensor += 1
        if kept:
            tensor.record_stream(side)
        del tensor
        assert bool(fakegpu.take_races()) != kept


CASES = [keep_the_host_out, order_by_events, bring_when_waited_for, free_in_order]


@pytest.mark.parametrize("case", CASES)
def test_the_device(case: Callable[[Rank], None]) -> None:
    accelerated(1).run(case)


# ---- a synchronisation that is missing is found ------------------------------------------------


def hurried(lane: Lane, tensor: Tensor) -> Tensor:
    """Lane.to_host, without waiting."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device=MAIN_MEMORY, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


MISSING: dict[str, dict[str, Any]] = {
    "nothing": {"mark": Lane.mark},
    "the mark of a gradient": {"mark": lambda lane: None},
    "the wait for a copy": {"to_host": hurried},
}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(30, 60), nn.Tanh(), nn.Linear(60, 10))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


def train(rank: Rank, missing: str, with_ddp: bool) -> tuple[list[str], bool]:
    """What was out of order, and whether all weights are finite."""
    torch.accelerator.synchronize()
    fakegpu.take_races()
    finite = False
    with mock.patch.multiple(Lane, **MISSING[missing]), contextlib.suppress(RuntimeError):
        weights = train_with_ddp(rank) if with_ddp else train_alone()
        finite = all(weight.isfinite().all().item() for weight in weights)
    return fakegpu.take_races(), finite


def train_with_ddp(rank: Rank) -> list[nn.Parameter]:
    models.place = accelerators.device()
    run = Run(rank)
    models.place = torch.device("cpu")
    attach_at_once(run.ddp, "topk", density=0.05)
    run.train(range(4))
    return list(run.ddp.parameters())


def train_alone() -> list[nn.Parameter]:
    model = Chain().to(accelerators.device())
    attach_at_once(model, "topk", density=0.05, group=dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        rng = torch.Generator().manual_seed(step)
        model(torch.randn(8, 30, generator=rng).to(accelerators.device())).backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("with_ddp", [True, False], ids=["DDP", "a module"])
@pytest.mark.parametrize("missing", MISSING)
def test_a_synchronisation_that_is_missing(missing: str, with_ddp: bool) -> None:
    for races, finite in accelerated(2).run(train, missing, with_ddp):
        assert (finite and not races) == (missing == "nothing"), races[:3]
