"""Options of the suite."""

import os

# Before torch: more threads of a process fight over the cores with its other ranks, and tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from accelerators import DEVICE
from processes import NAIVE

# Files that take long start first: short ones then fill what is left of the workers.
LONGEST = [
    f"test_{name}"
    for name in (
        *("examples", "reference", "lab_command", "accelerator", "attach", "process_group", "fsdp"),
        *("machines_on_devices", "ddp", "rows_notice", "kinds_of_models", "two_levels", "cluster"),
        *("device", "fsdp_checkpoints", "report", "attach_methods", "checkpoints", "faults"),
    )
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--naive",
        action="store_true",
        help="replace attach() by one that keeps its state by place in the buckets (naive.py)",
    )
    parser.addoption(
        "--device",
        help="the accelerator for tests that need one, such as cuda; without it one that tests "
        "bring along (fakegpu)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--naive"):
        os.environ[NAIVE] = "1"  # ranks read it
    if config.getoption("--device"):
        os.environ[DEVICE] = config.getoption("--device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
