"""Drives a Reducer through steps with flat gradients and any cut into buckets."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from topreduce import Communicator, Reducer, StepStats

Floats = NDArray[np.float32]
Buckets = Sequence[Sequence[int]]


def random_buckets(rng: np.random.Generator, parameters: int) -> Buckets:
    """All parameters in any order, cut at any places."""
    order = rng.permutation(parameters)
    cuts = np.sort(rng.integers(0, parameters + 1, size=rng.integers(0, 4)))
    return [part.tolist() for part in np.split(order, cuts) if part.size]


def split(values: Floats, sizes: Sequence[int]) -> list[Floats]:
    """Views of stretches of these sizes; np.split would take longer than the steps."""
    ends = list(itertools.accumulate(sizes))
    return [values[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def run_step(
    reducer: Reducer,
    comm: Communicator,
    gradient: Floats,
    buckets: Buckets,
    loss_scale: float = 1.0,
    unused: Sequence[int] = (),
) -> tuple[Floats, StepStats]:
    """The mean, flat over the model like `gradient`, which stays as it is."""
    sizes = reducer.layout.sizes
    parts = split(gradient, sizes)
    arrays = [np.concatenate([parts[p] for p in bucket]) for bucket in buckets]
    reducer.begin(comm, loss_scale)
    for number, (bucket, array) in enumerate(zip(buckets, arrays, strict=True), 1):
        if unused and number == len(buckets):
            reducer.participate(unused=unused)
        reducer.add(bucket, array)
    stats = reducer.finish()
    means = [np.empty(0, np.float32)] * len(sizes)
    for bucket, array in zip(buckets, arrays, strict=True):
        for p, mean in zip(bucket, split(array, [sizes[p] for p in bucket]), strict=True):
            means[p] = mean
    return np.concatenate([np.empty(0, np.float32), *means]), stats


def flat_owed(reducer: Reducer) -> Floats:
    """What is owed, flat over the model."""
    owed = [reducer.owed(name).ravel() for name in reducer.layout.names]
    return np.concatenate([np.empty(0, np.float32), *owed])


def same_bits(a: Floats, b: Floats) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def snapshot(reducer: Reducer) -> dict[str, object]:
    """Its whole state in comparable form, arrays as bytes."""
    state = reducer.state()
    entries = {
        name: {parameter: array.tobytes() for parameter, array in by_parameter.items()}
        for name, by_parameter in state["entries"].items()
    }
    return {**state, "entries": entries, "owed": flat_owed(reducer).tobytes()}
