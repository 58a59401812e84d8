"""Loss against seconds as a picture of its own: `topreduce lab plot`."""

from __future__ import annotations

import math

from topreduce.lab.experiments.methods import AGAIN
from topreduce.lab.report.losses import cut_words, to_reach, top
from topreduce.lab.report.names import in_words, is_ours
from topreduce.lab.report.picture import picture
from topreduce.lab.report.results import Results, mean
from topreduce.lab.report.svg import Series, line_chart

_CLOCKS = {
    "real": "Real clock: seconds that passed on the emulated network; evaluations do not count.",
    "race": "Clock of a race: trained without the limit, each step takes what it took in a race.",
}


def loss_plot(results: Results) -> str:
    """An SVG file with a line for each training, of each method with its best setting only.

    ValueError if nothing was trained.
    """
    if not results.runs:
        raise ValueError("no training among these results: topreduce lab train makes some")
    labels = best_settings(results)
    left_out = [label for label in results.labels() if label not in labels and AGAIN not in label]
    runs = [run for label in labels for run in results.runs_of(label)]
    levels = to_reach(results)
    highest = top(runs, levels)
    series = [
        Series(
            in_words(run.label),
            [(each.seconds, each.loss) for each in run.evaluations],
            labels.index(run.label),
            ours=is_ours(run.spec),
        )
        for run in runs
    ]
    chart = line_chart(
        "seconds",
        "loss on held-out data",
        series,
        "linear",
        levels=levels,
        names="at lines",
        top=highest,
    )
    model, parameters = results.workload["model"], runs[0].parameters
    notes = [_CLOCKS[results.clock], *cut_words(runs, highest, in_words)]
    if left_out:
        notes.append(f"Not drawn, since slower: {', '.join(map(in_words, left_out))}.")
    notes.append(_place(results))
    title = f"Loss against seconds: {model}, {parameters / 1e6:.3g} M parameters, {results.network}"
    return picture(title, chart, notes=notes)


def best_settings(results: Results) -> list[str]:
    """Labels of the trained methods; of one with several settings that which was soonest at the
    loss to reach, or came nearest to it.
    """
    best: dict[str, str] = {}
    for label in results.labels():
        if AGAIN in label:
            continue
        name = label.partition(":")[0]
        if name not in best or _merit(results, label) < _merit(results, best[name]):
            best[name] = label
    return list(best.values())


def _merit(results: Results, label: str) -> tuple[float, float]:
    runs = results.runs_of(label)
    seconds = []
    for run in runs:
        aim = results.target(run.seed)
        reached = None if aim is None else run.reached(aim)
        seconds.append(math.inf if reached is None else reached.seconds)
    return mean(seconds), mean([run.final_loss for run in runs])


def _place(results: Results) -> str:
    facts = results.machine
    versions = f"topreduce {facts['topreduce']}, torch {facts['torch']}"
    return f"{results.date[:10]}, {facts['processor']}, {facts['cores']} cores; {versions}."
