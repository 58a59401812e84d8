"""What charts of losses show: which loss is to be reached, and where they end upwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from topreduce.lab.experiments.train import Evaluation, TrainRun
from topreduce.lab.report.results import Results

_FIRST_SHARE = 0.04  # of the seconds: losses that only stood before it need no room


def to_reach(results: Results) -> list[tuple[str, float]]:
    """The loss to reach, if there is one, as a line across."""
    aim = results.aim()
    return [] if aim is None else [(f"to reach: {aim:.3f}", aim)]


def top(runs: Sequence[TrainRun], levels: Sequence[tuple[str, float]]) -> float:
    """The highest loss that gets room: the first fall is the same for all, and steep; what lies
    above the untrained model would only press the other lines together. `levels` get it anyway.
    """
    start = _start(runs)
    first = [losses[0] for run in runs if (losses := _finite(_from(start, run)))]
    untrained = [losses[0] for run in runs if (losses := _finite(run.evaluations))]
    highest = min(max(first, default=math.inf), max(untrained, default=math.inf))
    return max([highest, *(level for _, level in levels)])


def cut_words(
    runs: Sequence[TrainRun], highest: float, name: Callable[[str], str] = str
) -> list[str]:
    """A note on what charts that end at this loss do not show; none if they show all."""
    losses = [each.loss for run in runs for each in run.evaluations]
    if highest == math.inf or all(loss <= highest for loss in losses):
        return []
    start = _start(runs)
    whole = {run.label for run in runs if all(each.loss <= highest for each in _from(start, run))}
    bad = dict.fromkeys(name(run.label) for run in runs if run.label not in whole)
    names = f", and later ones of {', '.join(bad)}" if bad else ""
    return [f"Losses above {highest:.3g} are cut off: those of the first steps{names}."]


def _start(runs: Sequence[TrainRun]) -> float:
    return _FIRST_SHARE * max(run.evaluations[-1].seconds for run in runs)


def _from(start: float, run: TrainRun) -> Sequence[Evaluation]:
    """Its evaluations from then on; the last one at least."""
    return [each for each in run.evaluations if each.seconds >= start] or run.evaluations[-1:]


def _finite(evaluations: Sequence[Evaluation]) -> list[float]:
    return [each.loss for each in evaluations if math.isfinite(each.loss)]
