"""Gradients on another device: main memory that is treated as if it were one.

What runs here is what would run on an accelerator, but for streams and pinned memory.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import Run
from processes import Rank, group

import topreduce
import topreduce.torch
from topreduce.torch import lane

METHODS = [method["name"] for method in topreduce.methods()]


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    """Models that are attached in here are on another device."""
    lane.pretend = True
    try:
        yield
    finally:
        lane.pretend = False


def same_training(rank: Rank, settings: dict[str, Any]) -> None:
    """Weights, debts and losses of a run there are those of a run in main memory, bit for bit."""
    here, there = Run(rank, bucket_cap_mb=0.02), Run(rank, bucket_cap_mb=0.02)
    sync_here = topreduce.torch.attach(here.ddp, **settings)
    with pretending():
        sync_there = topreduce.torch.attach(there.ddp, **settings)
        there.train(range(6))
    here.train(range(6))
    assert there.digest() == here.digest()
    state_here, state_there = sync_here.state_dict(), sync_there.state_dict()
    assert state_here.keys() == state_there.keys()
    for key, value in state_here.items():
        other = state_there[key]
        same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
        assert same, key


@pytest.mark.parametrize("method", METHODS)
def test_every_method_works_there(method: str) -> None:
    density = {} if method == "dense" else {"density": 0.05}
    group(2).run(same_training, {"method": method, **density})
