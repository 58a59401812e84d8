"""FSDP2 between replicas on an accelerator: shards, and what is owed of them, stay there."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import test_fsdp
import torch
from accelerators import is_fake, on_device
from models import owed
from processes import Rank, accelerated
from sharded import Case, attach, build, local_weights, mesh_of, usual_step
from torch import Tensor

import topreduce.torch
from topreduce.torch import device

CASES = ["hold", "checkpoints inside", "unused everywhere"]
SETTINGS: list[dict[str, Any]] = [
    {"method": "topk", "density": 0.1, "verify_every": 2},
    {"method": "arc_topk", "density": 0.3, "reduce": "native"},
    {"method": "arc_topk", "density": 0.3},  # by way of main memory
]


def equal_native_there(rank: Rank) -> None:
    with on_device():
        test_fsdp.equal_native(rank, CASES)


@pytest.mark.long
def test_equals_native_hsdp_on_a_device() -> None:
    accelerated(4).run(equal_native_there)


def cut_large_models(rank: Rank) -> None:
    """Parts grow with the model: as much on all ranks, though their shards are not of one size."""
    with on_device(), mock.patch.object(device, "_STOPS", 4.001):
        mesh = mesh_of(2, 2)
        sync = topreduce.torch.attach(build(Case(), mesh["shard"]), replicas=mesh["replicate"])
    assert float(sync._reducer.spec["bucket_cap_mb"]) > 1


def test_large_models_on_uneven_shards() -> None:
    accelerated(4).run(cut_large_models)


def train(rank: Rank, settings: dict[str, Any], there: bool) -> tuple[Tensor, Tensor]:
    """Weights, and what is owed."""
    with on_device() if there else contextlib.nullcontext():
        mesh = mesh_of(2, 2)
        root = build(Case(), mesh["shard"])
        sync = attach(root, mesh, **settings)
        assert sync._reducer.on_device == (there and settings != SETTINGS[2]), settings
        optimizer = torch.optim.AdamW(root.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            usual_step(root, sync, step)
            optimizer.step()
        return local_weights(root).cpu(), owed(sync)


def train_as_on_the_cpu(rank: Rank) -> None:
    for settings in SETTINGS:
        here, there = train(rank, settings, False), train(rank, settings, True)
        assert torch.equal(here[0], there[0]), settings
        assert torch.equal(here[1], there[1]), settings


@pytest.mark.skipif(not is_fake(), reason="other devices add in other orders")
def test_sharded_trainings_are_those_of_the_cpu() -> None:
    accelerated(4).run(train_as_on_the_cpu)
