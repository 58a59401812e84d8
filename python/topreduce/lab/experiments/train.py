"""Training to the same loss, or for the same time: loss against seconds and bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

from topreduce.lab.experiments.methods import AGAIN, Method
from topreduce.lab.experiments.replica import Replica, Step
from topreduce.lab.tasks.models import Workload

REFERENCE = "dense"
SEEDS_APART = 1000  # of a training and its A/A: other weights, other batches
_RECENT = 20  # steps whose mean loss is shown
_LAST_SHARE = 0.1  # of the learning rate, at the end of a cosine


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What to train; the same on all ranks."""

    workload: Workload
    methods: Sequence[Method]
    seeds: int = 1
    steps: int = 300
    seconds: float | None = None  # train each method for all of this, whatever steps that gives
    target_loss: float | None = None  # stop here; None: the loss that dense ends with, if it runs
    patience: float = 3.0  # methods that have not reached it after so many times the steps give up
    evaluate_every: int = 10
    optimizer: str | None = None
    learning_rate: float | None = None
    schedule: Literal["constant", "cosine"] = "constant"  # of the learning rate
    sample: int = 0  # characters that the model writes in the end


@dataclass(frozen=True)
class Progress:
    """What rank 0 reports now and then."""

    label: str
    seed: int
    step: int
    share: float  # of the work, as far as known
    loss: float
    reached: str  # when it had the loss to reach, in words; empty: not yet


@dataclass(frozen=True)
class Evaluation:
    """The loss on held-out data, after so many steps."""

    step: int
    seconds: float
    bytes_sent: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class TrainRun:
    """One training: lists have one number for each step."""

    label: str
    spec: str
    seed: int
    parameters: int
    seconds: list[float]
    bytes_sent: list[float]  # at the interface; of rank 0
    losses: list[float]  # on rank 0's batches
    density: list[float]  # the following three are empty unless the method is ours
    kept_energy: list[float]
    owed_norm: list[float]
    evaluations: list[Evaluation]
    sample: str = ""
    waited: list[float] = field(default_factory=list)  # seconds of each step; empty unless ours

    @property
    def final_loss(self) -> float:
        return self.evaluations[-1].loss

    def reached(self, loss: float) -> Evaluation | None:
        """The first evaluation with this loss or a lower one."""
        return next((each for each in self.evaluations if each.loss <= loss), None)


def train_rank(
    rank: int, world_size: int, options: TrainOptions, report: Callable[[Progress | TrainRun], None]
) -> None:
    """Every method with every seed, one after the other in the same processes.

    Rank 0 reports each training as soon as it is over, so that no later one can take it along.
    """
    torch.set_num_threads(1)
    for seed in range(options.workload.seed, options.workload.seed + options.seeds):
        target = options.target_loss
        for method in in_order(options):
            training = _Training(rank, options, method, seed, target, report)
            run = training.run()
            if rank == 0:
                report(run)
            if method.spec == REFERENCE and target is None:
                target = run.final_loss


def in_order(options: TrainOptions) -> list[Method]:
    """Dense first, since it sets the loss to reach; then again, to reach its own with another
    seed. Where there are several seeds, those show what luck is.
    """
    methods = sorted(options.methods, key=lambda method: method.spec != REFERENCE)
    if methods[0].spec == REFERENCE and options.seconds is None and options.seeds == 1:
        methods.insert(1, methods[0].again())
    return methods


class _Training:
    """One method with one seed."""

    def __init__(
        self,
        rank: int,
        options: TrainOptions,
        method: Method,
        seed: int,
        target: float | None,
        report: Callable[[Progress], None],
    ) -> None:
        self._rank = rank
        self._options = options
        self._method = method
        self._seed = seed
        self._target = target
        self._report = report
        apart = SEEDS_APART if method.label.endswith(AGAIN) else 0
        workload = dataclasses.replace(options.workload, seed=seed + apart)
        self._replica = Replica(rank, workload, method, options.optimizer, options.learning_rate)
        self._steps: list[Step] = []
        self._evaluations: list[Evaluation] = []
        self._reached = ""
        self._share = 0.0  # of the training that is done; the same on all ranks
        self._next_look = 1
        self._spent = 0.0
        self._sent = 0.0

    def run(self) -> TrainRun:
        self._evaluate()
        while self._share < 1:
            rate = 1.0
            if self._options.schedule == "cosine":
                rate = _LAST_SHARE + (1 - _LAST_SHARE) * (1 + math.cos(math.pi * self._share)) / 2
            step = self._replica.step(rate)
            self._steps.append(step)
            self._spent += step.end - step.start
            self._sent += step.bytes_sent
            self._look_at_the_clock()
            if len(self._steps) % self._options.evaluate_every == 0 or self._share >= 1:
                self._evaluate()
        sample = ""
        if self._rank == 0:
            sample = self._replica.task.sample(self._options.sample)
        self._replica.close()
        model = self._replica.task.model
        stats = [step.stats for step in self._steps if step.stats]
        return TrainRun(
            label=self._method.label,
            spec=self._method.spec,
            seed=self._seed,
            parameters=sum(each.numel() for each in model.parameters()),
            seconds=[step.end - step.start for step in self._steps],
            bytes_sent=[step.bytes_sent for step in self._steps],
            losses=[step.loss for step in self._steps],
            density=[each["selected"] / max(1, each["entries"]) for each in stats],
            kept_energy=[each["kept_energy"] for each in stats],
            owed_norm=[each["owed_norm"] for each in stats],
            evaluations=self._evaluations,
            sample=sample,
            waited=[each["seconds_waited"] for each in stats],
        )

    def _look_at_the_clock(self) -> None:
        """How much is done? Where time decides, rank 0 tells the others about once a second."""
        done, options = len(self._steps), self._options
        if options.seconds is None:
            self._share = done / (options.steps * (1 if self._target is None else options.patience))
        elif done >= self._next_look:
            steps_per_second = done / max(self._spent, 1e-3)
            word = torch.tensor([self._spent / options.seconds, max(1.0, steps_per_second)])
            dist.broadcast(word, 0)
            self._share, self._next_look = float(word[0]), done + int(word[1])
        self._tell()

    def _tell(self) -> None:
        if self._rank == 0 and self._steps:
            recent = [step.loss for step in self._steps[-_RECENT:]]
            loss, done = sum(recent) / len(recent), len(self._steps)
            self._report(
                Progress(self._method.label, self._seed, done, self._share, loss, self._reached)
            )

    def _evaluate(self) -> None:
        """Outside of the clock: neither its seconds nor its bytes count."""
        loss = self._replica.validation_loss()
        self._evaluations.append(
            Evaluation(
                step=len(self._steps),
                seconds=self._spent,
                bytes_sent=self._sent,
                loss=loss,
            )
        )
        if self._target is None or loss > self._target or self._reached:
            return
        if self._options.seconds is not None:
            self._reached = f"{self._target:.2f} reached in {self._spent:.0f} s"
        elif self._share < 1:
            self._share, self._reached = 1.0, f"{self._target:.2f} reached"
            self._tell()
