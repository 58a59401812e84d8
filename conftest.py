"""Options of the suite."""

import os

# Before torch: more threads of a process fight over the cores with its other ranks, and tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from accelerators import DEVICE
from processes import NAIVE
from tiers import LONG_TESTS

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
    config.addinivalue_line("markers", "long: only runs where TOPREDUCE_LONG_TESTS is set")
    if config.getoption("--naive"):
        os.environ[NAIVE] = "1"  # ranks read it
    if config.getoption("--device"):
        os.environ[DEVICE] = config.getoption("--device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if LONG_TESTS not in os.environ:
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
