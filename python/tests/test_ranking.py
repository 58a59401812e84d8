"""Rows that a device chooses by the sum of their sketches: those that the core would choose."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_device import gradient_of

from topreduce import Communicator, Layout, Reducer, WireError, run_ranks
from topreduce.torch.ranking import best_rows, digits_of
from topreduce.torch.summing_device import SummingDevice

SKETCH = 4
PARTS = [(0, 9, 5, 4), (45, 0, 3, 0), (50, 6, 2, 6), (62, 0, 1, 0), (63, 1, 7, 1), (80, 4, 3, 0)]


def plain_choice(sums: NDArray[Any], picks: NDArray[Any]) -> tuple[list[int], list[int]]:
    """As device.h has it, one after the other."""
    sums = sums.reshape(-1, SKETCH).astype(np.float64)
    starts, places = [], []
    for start, rows, width, count in PARTS:
        energies = [sum(float(value) ** 2 for value in row) / width for row in sums[:rows]]
        energies = [each if np.isfinite(each) else np.inf for each in energies]
        order = sorted(range(rows), key=lambda row: (-energies[row], row))
        taken = sorted(start + width * order[place] for place in picks[:count])
        sums, picks = sums[rows:], picks[count:]
        for begin in taken if rows else [start]:
            starts.append(begin)
            places.extend(range(begin, begin + width))
    return starts, places


@pytest.mark.parametrize("seed", range(20))
def test_the_rows_are_those_of_a_plain_reading(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sums = rng.integers(-2, 3, SKETCH * sum(rows for _, rows, _, _ in PARTS)).astype(np.float32)
    sums[rng.integers(sums.size, size=3)] = [np.inf, np.nan, 3e38]
    picks = np.concatenate([rng.permutation(rows)[:count] for _, rows, _, count in PARTS])
    picks = picks.astype(np.uint32)
    lines = np.array(PARTS, np.int64)
    taken = best_rows(torch.from_numpy(sums), lines, picks, torch.from_numpy)
    assert (taken.starts.tolist(), taken.places.tolist()) == plain_choice(sums, picks)


def test_digits_tell_rows_apart() -> None:
    """Exact as floats, and other ones for other rows."""
    rows = torch.arange(0, 7000, 7)
    seen = [digits_of(rows[rows != each]) for each in rows[:200]]
    assert len({tuple(each.tolist()) for each in seen}) == 200
    assert all(float(each.max()) <= 225 and float(each[0]) == 1 for each in seen)


class Adder:
    """Ranks that are threads, one of which may hear a sum wrong."""

    def __init__(self, everyone: list[Any], barrier: threading.Barrier, rank: int) -> None:
        self._everyone, self._barrier, self._rank = everyone, barrier, rank
        self.mishears = False

    def all_reduce(self, values: torch.Tensor) -> None:
        self._everyone[self._rank] = values.clone()
        self._barrier.wait()
        values.copy_(torch.stack(self._everyone).sum(0))
        self._barrier.wait()
        if self.mishears:
            values[-8:] = 1e6  # two rows of sketches
        self.mishears = False


@pytest.mark.parametrize("mishears", [-1, 1])
def test_ranks_that_choose_other_rows_say_so(mishears: int) -> None:
    layout = Layout([("weight", [40, 30]), ("bias", [40])])
    everyone: list[Any] = [None] * 3
    barrier = threading.Barrier(3)

    def body(comm: Communicator) -> None:
        reducer = Reducer(layout, "arc_topk:density=0.2,reduce=native,granularity=model")
        device = SummingDevice(torch.device("cpu"))
        adder = Adder(everyone, barrier, comm.rank)
        adder.mishears = comm.rank == mishears
        device.adder = lambda: adder
        reducer.use(device)
        gradient = torch.from_numpy(gradient_of(comm.rank, 0, layout))
        device.hold([0, 1], layout.sizes, gradient)
        reducer.begin(comm)
        reducer.add_on_device([0, 1])
        if mishears < 0:
            reducer.finish()
            assert 0 < gradient.count_nonzero() <= 8 * 30 + 40
            return
        with pytest.raises(WireError, match="chose different rows"):
            reducer.finish()
        assert not np.any(reducer.owed("weight"))

    run_ranks(3, body)
