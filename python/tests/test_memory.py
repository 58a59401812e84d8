"""What a step needs beside DDP's buckets, counted in tensors that are alive while it runs."""

import contextlib
import gc
import threading
from typing import Any
from unittest import mock

import models
import pytest
import torch
from accelerators import on_device
from models import attach_at_once
from processes import Rank, accelerated, group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from topreduce.torch import Sync
from topreduce.torch.device import GradientDevice

PARAMETERS, EACH = 6, 20_000
COPY = 4 * EACH  # bytes of a bucket in fp32
MODEL = COPY * PARAMETERS
TOPK: dict[str, Any] = {"method": "topk", "density": 0.01}
ARC: dict[str, Any] = {"method": "arc_topk", "density": 0.2}  # by way of main memory


class Columns(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        shape = 100, EACH // 100
        self.columns = nn.ParameterList(torch.ones(shape, dtype=dtype) for _ in range(PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(column * x).sum().float() for column in self.columns]).sum()


def full_precision() -> dict[int, Any]:
    """The memory that tensors in fp32 hold, by address."""
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    storages = [each.untyped_storage() for each in tensors if each.dtype == torch.float32]
    return {each.data_ptr(): each for each in storages}


class Meter:
    """The most bytes that steps added to what was there when it was made."""

    def __init__(self) -> None:
        self.before = full_precision()  # kept, so that nothing else gets its place
        self.most = 0

    def look(self) -> int:
        now = full_precision()
        more = sum(now[place].nbytes() for place in now.keys() - self.before.keys())
        self.most = max(self.most, more)
        return more


def start(dtype: torch.dtype, settings: dict[str, Any]) -> tuple[DistributedDataParallel, Sync]:
    ddp = DistributedDataParallel(Columns(dtype).to(models.place), bucket_cap_mb=1e-5)
    sync = attach_at_once(ddp, **settings)
    step(ddp)  # DDP cuts its buckets anew
    step(ddp)
    assert len(sync._reducer.buckets) == PARAMETERS
    return ddp, sync


def step(ddp: DistributedDataParallel) -> None:
    ddp.zero_grad(set_to_none=False)
    ddp(torch.linspace(0, 1, EACH // 100).to(ddp.module.columns[0])).backward()


def left_over(meter: Meter, sync: Sync) -> int:
    """Bytes, once the worker has put the step away: backward() does not wait for that."""
    away = threading.Event()
    sync._steps._tasks.put(away.set)
    away.wait()
    return meter.look()


def on_a_device(rank: Rank, dtype: torch.dtype) -> None:
    """One bucket's copy at a time."""
    with on_device():
        ddp, sync = start(dtype, TOPK)
    assert sync._reducer.on_device
    meter, opened = Meter(), GradientDevice.open

    def look_around(*arguments: Any) -> None:
        opened(*arguments)
        meter.look()

    with mock.patch.object(GradientDevice, "open", look_around):
        step(ddp)
    assert COPY <= meter.most < 1.5 * COPY, meter.most / COPY
    assert left_over(meter, sync) < 0.5 * COPY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_device_one_bucket_at_a_time_is_copied(dtype: torch.dtype) -> None:
    accelerated(2).run(on_a_device, dtype)


def in_main_memory(rank: Rank, dtype: torch.dtype, copied: bool) -> None:
    """A copy of each bucket until the step ends, unless DDP's own memory will do."""
    with on_device() if copied else contextlib.nullcontext():
        ddp, sync = start(dtype, ARC if copied else TOPK)
    assert not sync._reducer.on_device
    meter, trim = Meter(), sync._comm.trim

    def look_around() -> None:
        meter.look()
        trim()

    sync._comm.trim = look_around  # type: ignore[method-assign]
    step(ddp)
    expected = MODEL if copied or dtype != torch.float32 else 0
    assert expected <= meter.most < expected + 0.5 * COPY, meter.most / COPY
    assert left_over(meter, sync) < 0.5 * COPY


@pytest.mark.parametrize("copied", [False, True], ids=["there", "copied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_main_memory_copies_live_until_the_step_ends(dtype: torch.dtype, copied: bool) -> None:
    (accelerated if copied else group)(2).run(in_main_memory, dtype, copied)
