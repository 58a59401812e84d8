"""The clock of a race: what a training would have taken on the slow network."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from topreduce.lab.experiments.methods import Method
from topreduce.lab.experiments.race import RaceRow
from topreduce.lab.experiments.train import REFERENCE, TrainRun


def on_the_clock_of(rows: Sequence[RaceRow], runs: Sequence[TrainRun]) -> list[TrainRun]:
    """Trainings without a limit, with the step times that a race measured under it.

    A step of a training may send more than the method's step in the race, during a ramp for
    instance: its time is then that of the race plus its share of the way to dense. A method that
    finds its density took its first steps in the race as well: those have the times seen there.
    """
    by_spec = {row.spec: row for row in rows}
    idle, dense = by_spec["noop"], by_spec[REFERENCE]
    clocked = []
    for run in runs:
        own = by_spec.get(run.spec, idle)
        seen = own.first_seconds[: len(run.bytes_sent)]
        later = run.bytes_sent[len(seen) :]
        seconds = [*seen, *(_step_seconds(sent, own, dense) for sent in later)]
        clocked.append(
            dataclasses.replace(
                run,
                seconds=seconds,
                evaluations=[
                    dataclasses.replace(each, seconds=sum(seconds[: each.step]))
                    for each in run.evaluations
                ],
            )
        )
    return clocked


def as_found(methods: Sequence[Method], rows: Sequence[RaceRow]) -> list[Method]:
    """Methods that find their density, made to send what they sent in the race, step by step.

    A training without the limit would find another one.
    """
    sent = {row.label: " ".join(row.levels) for row in rows}
    return [
        dataclasses.replace(method, replay=sent[method.label]) if method.searches else method
        for method in methods
    ]


def _step_seconds(sent: float, own: RaceRow, dense: RaceRow) -> float:
    way = dense.mean_bytes - own.mean_bytes
    if sent <= own.mean_bytes or way <= 0:
        return own.median
    share = (sent - own.mean_bytes) / way
    return own.median + share * max(0.0, dense.median - own.median)
