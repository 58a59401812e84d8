"""Training with ranks as threads of one process: the cheap way on few cores."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from topreduce import Communicator, Layout, Reducer, StepStats, run_ranks

CORES = 2  # that compute at a time
Floats = npt.NDArray[np.float32]


class Problem(Protocol):
    """A model with its data."""

    model: nn.Module

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        """On the batch of this rank and step."""

    def score(self, model: nn.Module) -> dict[str, float]:
        """On data kept back: "loss", and what else tells how good it is."""


@dataclass(frozen=True)
class Training:
    """How a problem is trained."""

    spec: str
    ranks: int = 4
    steps: int = 300
    optimizer: str = "adamw"  # or "sgd", "momentum"
    rate: float = 3e-3


@dataclass
class Outcome:
    """`watched` holds what the watcher returned, by step."""

    score: dict[str, float]
    bytes: float  # per step and rank, over the second half of the steps
    seconds: float
    watched: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Look:
    """What a watcher sees on every rank, before and after a step."""

    rank: int
    step: int
    gradient: Floats  # this rank's own
    owed: Floats  # before the step
    mean: Floats  # what everyone applies
    stats: StepStats


Watcher = Callable[[Look], Any]


def layout_of(model: nn.Module) -> Layout:
    return Layout([(name, tuple(each.shape)) for name, each in model.named_parameters()])


def flat_gradient(model: nn.Module) -> Floats:
    parts = [
        torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()
    ]
    flat: Floats = torch.cat([part.flatten() for part in parts]).numpy()
    return flat


def owed_of(reducer: Reducer, layout: Layout) -> Floats:
    return np.concatenate([reducer.owed(name).ravel() for name in layout.names])


def give_gradient(model: nn.Module, flat: Floats) -> None:
    start = 0
    for each in model.parameters():
        piece = torch.from_numpy(flat[start : start + each.numel()])
        each.grad = piece.view_as(each)
        start += each.numel()


def make_optimizer(name: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9 if name == "momentum" else 0)


def train(
    make: Callable[[], Problem],
    training: Training,
    watch: Watcher | None = None,
    watch_every: int = 1,
) -> Outcome:
    """Trains copies of what `make` makes, one on every rank; they stay the same, bit for bit."""
    torch.set_num_threads(1)
    # More threads than cores would only hold each other up.
    cores = threading.Semaphore(CORES)
    # Made here: torch's random numbers are those of the process.
    problems = [make() for _ in range(training.ranks)]

    def body(comm: Communicator) -> Outcome:
        problem = problems[comm.rank]
        model = problem.model
        layout = layout_of(model)
        reducer = Reducer(layout, training.spec)
        optimizer = make_optimizer(training.optimizer, model, training.rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.55 + 0.45 * math.cos(math.pi * step / training.steps)
        )
        sent: list[float] = []
        watched: list[Any] = []
        seconds = 0.0
        for step in range(training.steps):
            with cores:
                optimizer.zero_grad()
                problem.loss(model, comm.rank, step).backward()  # type: ignore[no-untyped-call]
                flat = flat_gradient(model)
            looked = watch is not None and step % watch_every == 0
            own = flat.copy() if looked else flat
            owed = owed_of(reducer, layout) if looked else flat
            reducer.begin(comm)
            reducer.add(list(range(len(layout))), flat)
            stats = reducer.finish()
            with cores:
                give_gradient(model, flat)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
            if step >= training.steps // 2:
                sent.append(stats.bytes_sent)
            if looked and watch is not None:
                mean = flat.copy()
                watched.append(watch(Look(comm.rank, step, own, owed, mean, stats)))
        score = problem.score(model) if comm.rank == 0 else {}
        return Outcome(score, float(np.mean(sent)), seconds, watched)

    outcomes = run_ranks(training.ranks, body)
    outcomes[0].watched = [outcome.watched for outcome in outcomes]
    return outcomes[0]


def compressed(
    inputs: Sequence[Floats], layout: Layout, spec: str, seed: int = 0
) -> tuple[Floats, int]:
    """The mean of what the method keeps of each rank's vector, without memory; bytes of a rank."""

    def body(comm: Communicator) -> tuple[Floats, int]:
        reducer = Reducer(layout, spec, feedback="none", granularity="model", seed=seed)
        values = inputs[comm.rank].copy()
        reducer.begin(comm)
        reducer.add(list(range(len(layout))), values)
        stats = reducer.finish()
        return values, stats.bytes_sent

    return run_ranks(len(inputs), body)[0]


def relative_error(out: Floats, mean: Floats) -> float:
    """|out - mean|^2 / |mean|^2."""
    wanted = mean.astype(np.float64)
    missed = out.astype(np.float64) - wanted
    return float(missed @ missed / (wanted @ wanted))
