"""The accelerator that tests use: our own for tests, or `--device cuda` and the like."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import fakegpu
import models
import torch

from topreduce.torch import attachment
from topreduce.torch.summing_device import SummingDevice

DEVICE = "TOPREDUCE_TESTS_DEVICE"  # set by --device; ranks read it


def name() -> str:
    return os.environ.get(DEVICE, fakegpu.NAME)


def is_fake() -> bool:
    return name() == fakegpu.NAME


def build() -> None:
    """What takes long and is needed by all ranks."""
    if is_fake():
        fakegpu.build()


def backend(rank: int) -> str:
    """Makes the device ready in this process; the backend of its process group."""
    if is_fake():
        fakegpu.load()
        return f"cpu:gloo,{fakegpu.NAME}:{fakegpu.BACKEND}"
    torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    return f"cpu:gloo,{name()}:gloo"  # Gloo lets ranks share a device, NCCL does not


def device() -> torch.device:
    return torch.device(name(), torch.accelerator.current_device_index())


@contextlib.contextmanager
def on_device() -> Iterator[None]:
    """Models that are made in here lie on the device. All that was done there was in order."""
    check_order()
    models.place = device()
    try:
        yield
    finally:
        models.place = torch.device("cpu")
    check_order()


def by_copy() -> contextlib.AbstractContextManager[Any]:
    """Models that are attached in here have their gradients looked at in main memory."""
    return mock.patch.object(attachment, "_device_of", return_value=None)


def by_torch() -> contextlib.AbstractContextManager[Any]:
    """The same in main memory by torch operations, as those of a device are. For models in bf16,
    some of whose operations fakegpu does not know.
    """
    make = mock.Mock(side_effect=lambda *_: SummingDevice(torch.device("cpu")))
    return mock.patch.object(attachment, "_device_of", make)


def check_order() -> None:
    if is_fake():
        races = fakegpu.take_races()
        assert not races, "\n".join(races[:5])
