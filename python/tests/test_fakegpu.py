"""The device that tests bring along bites: what is not ordered, or not waited for, is poison."""

import contextlib
import ctypes
import functools
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
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

from topreduce.torch import surroundings
from topreduce.torch.ddp import _Bucket
from topreduce.torch.device_group import DeviceGroup
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
        torch.ones(5, device=fakegpu.NAME)  # might lie in the same memory
        assert any("record_stream" in each for each in fakegpu.take_races()) != kept


CASES = [keep_the_host_out, order_by_events, bring_when_waited_for, free_in_order]


@pytest.mark.parametrize("case", CASES)
def test_the_device(case: Callable[[Rank], None]) -> None:
    accelerated(1).run(case)


# ---- a synchronisation that is missing is found ------------------------------------------------


def hurried(lane: Lane, tensor: Tensor) -> Tensor:
    """Lane.to_host, without waiting."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device=MAIN_MEMORY, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def read_at_once(value: Tensor) -> Callable[[], float]:
    """lane.read_later, without waiting."""
    host = torch.empty((), dtype=value.dtype, device=MAIN_MEMORY, pin_memory=True)
    host.copy_(value.detach().reshape(()), non_blocking=True)
    return lambda: float(host)


def complete_elsewhere(bucket: _Bucket, error: Exception | None) -> None:
    """_Bucket.complete, in a stream that is not the worker's."""
    bucket.future.set_result(bucket.buffer)


class Missing(NamedTuple):
    """A synchronisation that is taken out, and the trainings that need it."""

    owner: Any
    name: str
    instead: Any
    needed_by: Sequence[str]


def train(rank: Rank, missing: str, how: str) -> tuple[list[str], bool]:
    """What was out of order, and whether all weights and gradients are finite."""
    torch.accelerator.synchronize()
    fakegpu.take_races()
    finite = False
    place = contextlib.nullcontext()
    if missing:
        owner, name, instead, _ = MISSING[missing]
        place = mock.patch.object(owner, name, instead)
    with place, contextlib.suppress(RuntimeError, ValueError, AssertionError):
        weights = TRAININGS[how](rank)
        finite = all(each.isfinite().all().item() for each in weights)
        finite &= all(each.grad.isfinite().all().item() for each in weights)
    return fakegpu.take_races(), finite


def train_with_ddp(rank: Rank, method: str = "topk", **settings: Any) -> list[nn.Parameter]:
    models.place = accelerators.device()
    run = Run(rank)
    models.place = torch.device("cpu")
    attach_at_once(run.ddp, method, density=0.05, **settings)
    run.train(range(4))
    return list(run.ddp.parameters())


def train_on_two_levels(rank: Rank) -> list[nn.Parameter]:
    return train_with_ddp(rank, local_group=dist.group.WORLD)


def train_alone(rank: Rank, method: str = "topk", **settings: Any) -> list[nn.Parameter]:
    model = Chain().to(accelerators.device())
    attach_at_once(model, method, density=0.05, group=dist.group.WORLD, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(numbers(step)).backward()
        optimizer.step()
    return list(model.parameters())


def train_natively(rank: Rank) -> list[nn.Parameter]:
    return train_alone(rank, "arc_topk", reduce="native")


def train_scaled(rank: Rank) -> list[nn.Parameter]:
    model = Chain().to(accelerators.device())
    scaler = torch.amp.GradScaler(fakegpu.NAME, init_scale=8.0)
    attach_at_once(model, "topk", density=0.05, group=dist.group.WORLD, scaler=scaler)
    for step in range(4):
        model.zero_grad()
        scaler.scale(model(numbers(step))).backward()
    return list(model.parameters())


def lose_a_step(rank: Rank) -> list[nn.Parameter]:
    """Gradients that are not finite: nothing is committed, and all of them become NaN."""
    model = Chain().to(accelerators.device())
    attach_at_once(model, "topk", density=0.05, group=dist.group.WORLD)
    for step in range(4):
        model.zero_grad()
        (model(numbers(step)) * (torch.inf if step == 1 else 1.0)).backward()
        seen = [each.grad.isnan().all() for each in model.parameters()]
        assert all(each.item() == (step == 1) for each in seen)
    return list(model.parameters())


def numbers(step: int) -> Tensor:
    rng = torch.Generator().manual_seed(step)
    return torch.randn(8, 30, generator=rng).to(accelerators.device())


TRAININGS: dict[str, Callable[[Rank], list[nn.Parameter]]] = {
    "DDP": train_with_ddp,
    "DDP, by copy": functools.partial(train_with_ddp, method="arc_topk"),
    "a module": train_alone,
    "a step that is lost": lose_a_step,
    "a module, natively": train_natively,
    "two levels": train_on_two_levels,
    "scaled": train_scaled,
}
MISSING = {
    "the mark of a gradient": Missing(Lane, "mark", lambda lane: None, ["DDP", "a module"]),
    "the wait for a copy": Missing(Lane, "to_host", hurried, ["DDP", "a module"]),
    # Other steps end with a stop, for their statistics, or with copies that wait.
    "the optimizer's wait": Missing(Lane, "join", lambda lane: None, ["a step that is lost"]),
    "the wait of DDP": Missing(_Bucket, "complete", complete_elsewhere, ["DDP, by copy"]),
    "the wait for the loss scale": Missing(surroundings, "read_later", read_at_once, ["scaled"]),
    "the wait for a collective": Missing(
        DeviceGroup,
        "_wait",
        lambda group, what, collective: collective(),
        ["a module, natively", "two levels"],
    ),
}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(30, 60), nn.Tanh(), nn.Linear(60, 10))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


@pytest.mark.parametrize("how", TRAININGS)
def test_nothing_is_missing(how: str) -> None:
    for races, finite in accelerated(2).run(train, "", how):
        assert finite
        assert not races, races[:3]


@pytest.mark.parametrize(
    ("missing", "how"), [(each, how) for each in MISSING for how in MISSING[each].needed_by]
)
def test_a_synchronisation_that_is_missing(missing: str, how: str) -> None:
    for races, finite in accelerated(2).run(train, missing, how):
        assert races or not finite
