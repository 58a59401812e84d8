"""One rank's training: DDP over the group that exists, with or without topreduce."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from topreduce.lab.gpt import GPT, preset
from topreduce.lab.text import Text, load_text

VALIDATION_BATCHES = 4
VALIDATION_BATCH = 64
STEPS_IN_PROGRESS_LOSS = 20
PLAIN_DDP = "ddp"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What to train and how; the same on all ranks."""

    method: str = PLAIN_DDP  # a method of topreduce, or "ddp": plain DDP without it
    attach: dict[str, Any] = field(default_factory=dict)  # further arguments of attach()
    model: str = "gpt:0.6m"
    context: int | None = None  # None: the model's own
    batch: int = 4  # sequences per rank and step
    steps: int = 600
    learning_rate: float = 3e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    sample: int = 0  # characters that rank 0 writes after the training
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What rank 0 reports after a step."""

    method: str
    step: int  # steps done
    loss: float  # mean over rank 0's last batches


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a training cost this rank and what came out; lists have one number per step."""

    method: str
    parameters: int
    validation_loss: float
    losses: list[float]
    bytes_sent: list[int]
    bytes_are: Literal["counted", "computed for a ring"]
    step_seconds: list[float]
    sample: str


def train_rank(
    rank: int, world_size: int, options: TrainOptions, report: Callable[[Progress], None]
) -> TrainResult:
    """Train this rank's replica in the default process group."""
    torch.set_num_threads(1)
    text = load_text()
    config = preset(options.model, context=options.context, vocabulary=len(text.characters))
    model = GPT(config, seed=options.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ddp = DistributedDataParallel(model)
    sync = _attach(ddp, options)
    optimizer = torch.optim.AdamW(
        ddp.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.1, fused=True
    )

    losses: list[float] = []
    bytes_sent: list[int] = []
    step_seconds: list[float] = []
    for step in range(options.steps):
        started = time.perf_counter()
        inputs, targets = text.training_batch(
            options.batch, config.context, seed=options.seed, rank=rank, step=step
        )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step)
        optimizer.zero_grad()
        loss = next_id_loss(ddp, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        step_seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
        bytes_sent.append(
            ring_bytes(parameters, world_size) if sync is None else sync.stats()["bytes_sent"]
        )
        if rank == 0:
            recent = losses[-STEPS_IN_PROGRESS_LOSS:]
            mean = sum(recent) / len(recent)
            report(Progress(method=options.method, step=step + 1, loss=mean))
    if sync is not None:
        sync.detach()

    return TrainResult(
        method=options.method,
        parameters=parameters,
        validation_loss=validation_loss(model, text),
        losses=losses,
        bytes_sent=bytes_sent,
        bytes_are="computed for a ring" if sync is None else "counted",
        step_seconds=step_seconds,
        sample=text.decode(model.generate(options.sample, options.seed)) if rank == 0 else "",
    )


def train_each(
    rank: int,
    world_size: int,
    runs: Sequence[TrainOptions],
    report: Callable[[Progress], None],
) -> list[TrainResult]:
    """Train once for each of `runs` in the same processes, as starting them takes seconds."""
    return [train_rank(rank, world_size, options, report) for options in runs]


def learning_rate(options: TrainOptions, step: int) -> float:
    """Rise over the first steps, then stay or fall along a cosine to a tenth."""
    rise = min(1.0, (step + 1) / max(1, min(20, options.steps // 10)))
    if options.schedule == "constant":
        return options.learning_rate * rise
    fall = 0.55 + 0.45 * math.cos(math.pi * step / options.steps)
    return options.learning_rate * rise * fall


def next_id_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next id, in nats."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def validation_loss(model: GPT, text: Text) -> float:
    """Loss over the same windows for every model and rank."""
    batches = text.validation_batches(VALIDATION_BATCHES, VALIDATION_BATCH, model.config.context)
    losses = [next_id_loss(model, inputs, targets).item() for inputs, targets in batches]
    return sum(losses) / len(losses)


def ring_bytes(entries: int, world_size: int) -> int:
    """Bytes that a rank sends when a ring averages `entries` floats of 32 bits."""
    return round(2 * (world_size - 1) / world_size * 4 * entries)


def _attach(ddp: DistributedDataParallel, options: TrainOptions) -> Any:
    if options.method == PLAIN_DDP:
        return None
    import topreduce.torch  # plain DDP must run without the extension

    return topreduce.torch.attach(ddp, options.method, seed=options.seed, **options.attach)
