"""Every method of the catalog trains the demo's GPT through attach(), in real processes."""

from statistics import mean
from typing import Any

import pytest
from processes import Rank, group

import topreduce
from topreduce.lab.train import TrainOptions, TrainResult, train_rank

METHODS = [method["name"] for method in topreduce.methods()]
STEPS = 14


def train(rank: Rank, method: str, settings: dict[str, Any]) -> TrainResult:
    options = TrainOptions(method=method, attach=settings, context=16, steps=STEPS)
    return train_rank(rank.rank, rank.ranks, options, lambda report: None)


@pytest.mark.parametrize("granularity", ["bucket", "model"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method: str, granularity: str) -> None:
    settings = {"granularity": granularity, **({} if method == "dense" else {"density": 0.05})}
    first, second = group(2).run(train, method, settings, seconds=180)
    # A loss over the same windows, to the last bit: the replicas are the same.
    assert first.validation_loss == second.validation_loss
    assert first.losses != second.losses, "each rank reads its own batches"
    assert mean(first.losses[-3:]) < mean(first.losses[:3]) - 0.1
    dense = 4 * first.parameters
    assert all(0 < sent < dense * (1.01 if method == "dense" else 0.6) for sent in first.bytes_sent)
