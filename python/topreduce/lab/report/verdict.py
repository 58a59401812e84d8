"""The answer before the numbers: is it worth it on this network?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from topreduce.lab.experiments.methods import AGAIN
from topreduce.lab.experiments.race import RaceRow
from topreduce.lab.experiments.train import REFERENCE, TrainRun
from topreduce.lab.report.names import is_ours
from topreduce.lab.report.results import Results, mean

_NEAR = 1.05  # less than that is no gain
_NOISY = 0.1  # A/A this far from 1 is told


@dataclass(frozen=True)
class _Time:
    """What a method takes: a step, or until the loss to reach."""

    label: str
    spec: str
    seconds: float


def verdict(results: Results) -> str:
    """One sentence or two; empty where there is nothing to compare."""
    if results.runs:
        return _of_training(results)
    return _of_race(results) if results.race else ""


def noise(rows: Sequence[RaceRow]) -> float | None:
    """How often as long the first method took when it ran a second time; None: it did not."""
    again = next((row for row in rows if row.label.endswith(AGAIN)), None)
    return again.median / rows[0].median if again else None


def _of_race(results: Results) -> str:
    times = [_Time(row.label, row.spec, row.median) for row in results.race if _is_plain(row)]
    return _compare(times, results.race, "a step with {ours} takes {seconds}", "")


def _of_training(results: Results) -> str:
    aim = results.aim()
    if aim is None:
        return ""
    times, late = [], []
    for label in results.labels():
        runs = results.runs_of(label)
        seconds = [_seconds_to_target(results, run) for run in runs]
        reached = [each for each in seconds if each is not None]
        if len(reached) == len(runs) and _is_plain(runs[0]):
            times.append(_Time(label, runs[0].spec, mean(reached)))
        elif is_ours(runs[0].spec):
            late.append(label)
    if late and not any(is_ours(each.spec) for each in times):
        return f"Not worth it: {', '.join(late)} did not reach a loss of {aim:.3f}."
    missed = f" {', '.join(late)} did not reach it." if late else ""
    words = f"{{ours}} reaches a loss of {aim:.3f} in {{seconds}}"
    return _compare(times, results.race, words, missed)


def _compare(times: Sequence[_Time], race: Sequence[RaceRow], words: str, missed: str) -> str:
    dense = next((each for each in times if each.spec == REFERENCE), None)
    ours = [each for each in times if is_ours(each.spec)]
    if dense is None or not ours:
        return ""
    best = min(ours, key=lambda each: each.seconds)
    if not best.seconds:  # the loss to reach is that of the untrained model
        return ""
    gain = dense.seconds / best.seconds
    said = words.format(ours=best.label, seconds=in_words(best.seconds))
    said += f", {REFERENCE} {in_words(dense.seconds)}"
    twice = noise(race)
    if twice is not None and abs(twice - 1) >= abs(gain - 1):
        return (
            f"Too noisy to tell: {said}, but the same method measured twice differs as much (A/A "
            f"{twice:.2f}). Take more --rounds, or a calmer machine.{missed}"
        )
    others = [each for each in times if not is_ours(each.spec) and each.spec != "noop"]
    rival = min(others, key=lambda each: each.seconds)
    beside = "."
    if rival is not dense:
        beside = f"; {rival.label}, the best of the others, {in_words(rival.seconds)}."
    if twice is not None and abs(twice - 1) >= _NOISY:
        beside += f" The machine was not calm: the same method measured twice, A/A {twice:.2f}."
    if gain < _NEAR:
        return f"Not worth it: {said}{beside}{missed}"
    quicker = f"{gain:.1f} times as fast as {REFERENCE}"
    if rival.seconds * _NEAR < best.seconds:
        return f"Not worth it, {quicker}, but not the best: {said}{beside}{missed}"
    lead = rival.seconds / best.seconds - 1
    if lead < max(_NEAR - 1, abs((twice or 1) - 1)):
        return f"No clear gain over {rival.label}, {quicker}: {said}{beside}{missed}"
    return f"Worth it, {quicker}: {said}{beside}{missed}"


def _seconds_to_target(results: Results, run: TrainRun) -> float | None:
    loss = results.target(run.seed)
    evaluation = None if loss is None else run.reached(loss)
    return None if evaluation is None else evaluation.seconds


def _is_plain(measured: RaceRow | TrainRun) -> bool:
    """Under its own name, and not a method that is measured in another way beside it."""
    return measured.label.endswith(measured.spec)


def in_words(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
