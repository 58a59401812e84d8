"""Trainings in streams of the user's: whatever computes, all of our work is ordered behind it."""

import time
from collections.abc import Callable
from typing import Any

import accelerators
import models
import pytest
import torch
import torch.distributed as dist
from accelerators import check_order, on_device
from models import attach_at_once
from processes import Rank, accelerated
from test_fakegpu import Chain, numbers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import topreduce.torch

pytestmark = pytest.mark.skipif(not accelerators.is_fake(), reason="finds what is not ordered")


def in_streams(rank: Rank, wrap: Callable[[nn.Module], nn.Module], **settings: Any) -> None:
    """The passes in one, the optimizer in another; nobody uses the default one."""
    computing, stepping = (torch.Stream(accelerators.name()) for _ in range(2))
    computing.wait_stream(torch.accelerator.current_stream())
    with computing:
        model = wrap(Chain().to(accelerators.device()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        attach_at_once(model, **settings)
        batches = [numbers(step) for step in range(5)]  # a copy that waits would order everything
        for batch in batches:
            model(batch).backward()
            stepping.wait_stream(computing)
            with stepping:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            computing.wait_stream(stepping)
    torch.accelerator.current_stream().wait_stream(computing)
    assert all(each.isfinite().all().item() for each in model.parameters())


def use_streams(rank: Rank) -> None:
    with on_device():
        usual: dict[str, Any] = {"method": "topk", "density": 0.05, "verify_every": 1}
        alone = {"group": dist.group.WORLD}
        in_streams(rank, DistributedDataParallel, **usual)
        in_streams(rank, lambda model: model, **usual, **alone)
        by_copy = usual | {"method": "arc_topk"}
        in_streams(rank, DistributedDataParallel, **by_copy)
        in_streams(rank, lambda model: model, **by_copy, **alone)
        in_streams(rank, DistributedDataParallel, **by_copy, reduce="native")


def test_passes_and_optimizers_in_streams() -> None:
    accelerated(2).run(use_streams)


class Large(nn.Module):
    """More than may be under way at once; the gradient of its first layer comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.ones(8), *(torch.ones(3 << 20) for _ in range(5))])
        self.late = 0.0  # seconds

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        late = first * 1
        late.register_hook(lambda gradient: time.sleep(self.late))
        return sum(((each * x).sum() for each in others), (late * x).sum())


def begin_late(rank: Rank) -> None:
    """An exchange that begins when others have ended does so in the worker's stream.

    Those of the first rank wait for the other, and end before its backward pass does.
    """
    with on_device():
        stream = torch.Stream(accelerators.name())
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            model = DistributedDataParallel(Large().to(accelerators.device()), bucket_cap_mb=1)
            topreduce.torch.attach(model, "dense")
            model.module.late = 1.0 if rank.rank == 0 else 0.0
            factors = [torch.tensor(step + rank.rank).to(models.place) for step in range(2)]
            for step, factor in enumerate(factors):
                model.zero_grad()
                time.sleep(0.3 * rank.rank)
                model(factor).backward()
                means = [each.grad[-1] for each in model.parameters()]
                assert torch.stack(means).eq(step + 0.5).all().item()
        torch.accelerator.current_stream().wait_stream(stream)
        check_order()


def test_exchanges_that_begin_late() -> None:
    accelerated(2).run(begin_late)
