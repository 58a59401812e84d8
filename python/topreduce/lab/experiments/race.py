"""The race: steps of real DDP, methods in turns within one process group.

Noise of the machine so hits all methods alike, and the first of them runs a second time under
another name: the ratio of the two, the A/A row, shows what noise is left.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from topreduce.lab.experiments.methods import Method, steps_before_steady
from topreduce.lab.experiments.replica import Replica, Step
from topreduce.lab.tasks.models import Workload

STAGES = ("look", "choose", "pack", "network", "unpack", "commit")
WARM_UP_STEPS = 3  # DDP cuts its buckets anew after the first, PowerSGD begins with the third
SEARCH_STEPS = 45  # of a method that finds its density


@dataclass(frozen=True, kw_only=True)
class RaceOptions:
    """What to race; the same on all ranks."""

    workload: Workload
    methods: Sequence[Method]
    rounds: int = 10
    steps: int = 2  # per turn
    # Methods that find their density begin as in a training: before they are measured.
    from_the_start: bool = False


@dataclass(frozen=True)
class Turn:
    """What rank 0 reports after each method's turn."""

    label: str
    round: int  # rounds done by this method; 0: warmed up
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RaceRow:
    """A method's result: lists have one number for each counted step."""

    label: str
    spec: str
    parameters: int
    seconds: list[float]  # from the first rank's start to the last rank's end
    bytes_sent: list[float]  # at the interface, mean over the ranks
    losses: list[float]  # mean over the ranks
    stages: dict[str, float]  # mean seconds by stage; empty unless ours
    stats: dict[str, float]  # means of what else we count; empty unless ours
    # Of a method that finds its density, for each step from its first one on: what it was to send,
    # also in words, and the part of the step that was waited. How long the steps took that are not
    # counted, while it searched. And what it found.
    densities: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    levels: list[str] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)
    level: str = ""
    reason: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def mean_bytes(self) -> float:
        return statistics.fmean(self.bytes_sent)


def with_again(methods: Sequence[Method]) -> list[Method]:
    """The first method a second time: the A/A row."""
    return [methods[0], methods[0].again(), *methods[1:]]


def race_rank(
    rank: int, world_size: int, options: RaceOptions, report: Callable[[Turn], None]
) -> list[tuple[int, list[Step], list[Step]]]:
    """One rank's part: parameters, counted steps and those before them, of every method."""
    torch.set_num_threads(1)
    if options.workload.device != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    whole = [options.from_the_start and method.searches for method in options.methods]
    methods = [
        method if from_start else method.steady()
        for method, from_start in zip(options.methods, whole, strict=True)
    ]
    replicas = [Replica(rank, options.workload, method) for method in methods]
    counted: list[list[Step]] = [[] for _ in replicas]
    before: list[list[Step]] = [[] for _ in replicas]
    for number in range(options.rounds + 1):
        for place in range(len(replicas)):
            # Another order in every round: no method always follows the same other.
            turn = (place + number) % len(replicas)
            first = SEARCH_STEPS if methods[turn].searches else WARM_UP_STEPS
            if whole[turn]:
                first += steps_before_steady(methods[turn].spec)
            steps = _take_turn(replicas[turn], options.steps if number else first)
            (counted if number else before)[turn] += steps
            if rank == 0:
                last = steps[-1]
                report(Turn(options.methods[turn].label, number, last.end - last.start))
    for replica in replicas:
        replica.close()
    parameters = sum(each.numel() for each in replicas[0].task.model.parameters())
    return [(parameters, *steps) for steps in zip(counted, before, strict=True)]


def _take_turn(replica: Replica, count: int) -> list[Step]:
    steps = []
    for _ in range(count):
        begin_together()
        steps.append(replica.step())
    dist.barrier()
    return steps


def begin_together() -> None:
    """Returns on all ranks at one time of the machine's clock.

    A barrier lets the ranks go one after the other where packets take their time.
    """
    dist.barrier()
    before = time.monotonic()
    dist.barrier()  # all are there, so this one takes what the network does
    now = time.monotonic()
    start = torch.tensor(now + 2 * (now - before), dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    time.sleep(max(0.0, start.item() - time.monotonic()))


def race_rows(
    options: RaceOptions, ranks: Sequence[Sequence[tuple[int, list[Step], list[Step]]]]
) -> list[RaceRow]:
    """The results of all ranks, put together by method."""
    rows = []
    for number, method in enumerate(options.methods):
        parameters = ranks[0][number][0]
        together = list(zip(*(rank[number][1] for rank in ranks), strict=True))
        stats = [step.stats for steps in together for step in steps if step.stats]
        rows.append(
            RaceRow(
                label=method.label,
                spec=method.spec,
                parameters=parameters,
                seconds=_seconds(together),
                bytes_sent=[statistics.fmean(step.bytes_sent for step in s) for s in together],
                losses=[statistics.fmean(step.loss for step in s) for s in together],
                stages={
                    stage: statistics.fmean(each["seconds"][stage] for each in stats)
                    for stage in STAGES
                    if stats
                },
                stats=_means(stats),
                **(_search([rank[number] for rank in ranks]) if method.searches else {}),
            )
        )
    return rows


def _search(ranks: Sequence[tuple[int, list[Step], list[Step]]]) -> dict[str, Any]:
    """How a density was found. All ranks end a step together: who waited least computed longest."""
    steps = [[each.stats for each in (*before, *counted)] for _, counted, before in ranks]
    together = list(zip(*steps, strict=True))
    first = list(zip(*(before for _, _, before in ranks), strict=True))
    return {
        "densities": [each[0]["density"] for each in together],
        "waiting": [
            min(rank["seconds_waited"] for rank in each)
            / max(rank["seconds_computed"] + rank["seconds_waited"] for rank in each)
            for each in together
        ],
        "levels": [each[0]["level"] for each in together],
        "first_seconds": _seconds(first),
        "level": steps[0][-1]["level"],
        "reason": steps[0][-1]["reason"],
    }


def _seconds(together: Sequence[tuple[Step, ...]]) -> list[float]:
    """From the first rank's start to the last rank's end, step by step."""
    return [max(each.end for each in step) - min(each.start for each in step) for step in together]


def _means(stats: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = ["selected", "delivered", "entries", "rounds", "kept_energy", "owed_norm"]
    names += ["bytes_sent", "seconds_waited", "hidden"]
    return {name: statistics.fmean(each[name] for each in stats) for name in names if stats}
