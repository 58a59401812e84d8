"""The charts of the page, each with its heading, its legend and what it needs in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from topreduce.lab.experiments.race import STAGES, RaceRow
from topreduce.lab.experiments.train import TrainRun
from topreduce.lab.report.losses import cut_words, to_reach, top
from topreduce.lab.report.names import OURS, is_ours, maker
from topreduce.lab.report.results import Results
from topreduce.lab.report.svg import (
    Bar,
    Scale,
    Series,
    bar_chart,
    is_drawn,
    line_chart,
    line_class,
)

Points = list[tuple[float, float]]
Curve = tuple[RaceRow | TrainRun, Points]

_MOST_POINTS = 400
_FEWEST_BYTES = 1000  # of a step that are worth drawing: noop's barriers are not
_PARTS = ("compute", *(f"averaging: {stage}" for stage in STAGES), "averaging by PyTorch")
_VISIBLE = 0.003  # of the longest bar


def loss_charts(several: Sequence[Results]) -> Iterator[str]:
    """Loss against time and against traffic; nothing if nothing was trained."""
    runs = [run for results in several for run in results.runs]
    if not runs:
        return
    levels = list(dict.fromkeys(level for each in several for level in to_reach(each)))
    highest = top(runs, levels)
    words = ["Lower and further to the left is better.", *cut_words(runs, highest)]
    if any(results.clock == "race" for results in several):
        words.append("Trained without the limit; the time of each step is that of the race.")
    chart = _Lines(several, levels, highest)
    yield f"<h2>Loss against time</h2>\n<p>{escape(' '.join(words))}</p>"
    yield from chart.draw("seconds", "loss on held-out data", [(r, _by_seconds(r)) for r in runs])
    yield "<h2>Loss against traffic</h2>"
    curves: list[Curve] = [(run, _by_bytes(run)) for run in runs]
    yield from chart.draw("MB sent by one host", "loss on held-out data", curves, "log")


def step_charts(several: Sequence[Results]) -> Iterator[str]:
    """Time and traffic of a step; nothing without a race."""
    rows = [row for results in several for row in results.race]
    if not rows:
        return
    bars = [_step_bar(row, results.race) for results in several for row in results.race]
    longest = max(row.median for row in rows)
    seen = {part for bar in bars for part, ms in bar.parts if ms > 1e3 * _VISIBLE * longest}
    yield "<h2>Where a step's time goes</h2>"
    yield "<p>Compute: a step of noop, which averages nothing. Averaging: what a method takes "
    yield "longer than that. PyTorch's do not tell where it goes. Ours do: it is divided in "
    yield "proportion to their stages, which run beside the backward pass, and which the table of "
    yield "the stages explains.</p>"
    yield bar_chart("milliseconds per step", bars)
    yield _legend("", [(f"part s{part}", _PARTS[part]) for part in sorted(seen)])
    yield "<h2>Traffic of a step</h2>"
    sent = [(row, row.mean_bytes / 1e6) for row in rows if row.mean_bytes >= _FEWEST_BYTES]
    points = [Bar(row.label, [(0, mb)], f"{mb:.3g} MB", is_ours(row.spec)) for row, mb in sent]
    yield bar_chart("MB sent by one host, in one step", points, "log")


def search_charts(several: Sequence[Results]) -> Iterator[str]:
    """How methods found their density in the race; nothing if none did."""
    rows = [row for results in several for row in results.race if row.densities]
    if not rows:
        return
    yield "<h2>How the density was found</h2>"
    for row in rows:
        yield f"<p>{escape(row.label)}: {escape(row.level)}; {escape(row.reason)}.</p>"
    curves: list[tuple[str, Callable[[RaceRow], list[float]]]] = [
        ("share of the entries to send", lambda row: row.densities),
        ("part of the step that was waited", lambda row: row.waiting),
    ]
    for title, values in curves:
        yield from _Lines(several).draw(
            "step of the race", title, [(row, _by_step(values(row))) for row in rows]
        )


def step_by_step_charts(several: Sequence[Results]) -> Iterator[str]:
    """What our methods did in each step of the training."""
    runs = [run for results in several for run in results.runs]
    curves: list[tuple[str, Callable[[TrainRun], list[float]]]] = [
        ("share of the entries that is sent", lambda run: run.density),
        ("seconds that backward() waited", lambda run: run.waited),
        ("share of the energy that is settled", lambda run: run.kept_energy),
        ("norm of what a rank owes", lambda run: run.owed_norm),
    ]
    for title, values in curves:
        if any(values(run) for run in runs):
            yield f"<h2>{title[0].upper()}{title[1:]}</h2>"
            drawn: list[Curve] = [(run, _by_step(values(run))) for run in runs]
            yield from _Lines(several).draw("step of the training", title, drawn)


# ---- lines ----------------------------------------------------------------------------------


class _Lines:
    """Charts in which a label has one colour, and so have runs that differ by their seed."""

    def __init__(
        self,
        several: Sequence[Results],
        levels: Sequence[tuple[str, float]] = (),
        highest: float = math.inf,
    ) -> None:
        labels = [label for results in several for label in results.labels()]
        labels += [row.label for results in several for row in results.race]
        self._colours = {label: n for n, label in enumerate(dict.fromkeys(labels))}
        self._levels, self._top = levels, highest

    def draw(
        self, x_label: str, y_label: str, curves: Sequence[Curve], scale: Scale = "linear"
    ) -> Iterator[str]:
        """A chart, and below it a legend by who made the methods: ours first."""
        series, makers = [], dict[str, dict[str, str]]()
        for each, points in curves:
            if is_drawn([point for point in points if math.isfinite(point[1])], self._top):
                colour, ours = self._colours[each.label], is_ours(each.spec)
                series.append(Series(each.label, _thinned(points), colour, ours))
                makers.setdefault(maker(each.spec), {})[each.label] = line_class(series[-1])
        yield line_chart(x_label, y_label, series, scale, levels=self._levels, top=self._top)
        for name, swatches in sorted(makers.items(), key=lambda group: group[0] != OURS):
            yield _legend(name, [(swatch, label) for label, swatch in swatches.items()])


def _legend(title: str, entries: Sequence[tuple[str, str]]) -> str:
    """Swatches, by their class, with names."""
    items = f"<li><b>{escape(title)}</b></li>" if title else ""
    items += "".join(f'<li><i class="{swatch}"></i>{escape(name)}</li>' for swatch, name in entries)
    return f'<ul class="legend">{items}</ul>'


def _by_seconds(run: TrainRun) -> Points:
    return [(each.seconds, each.loss) for each in run.evaluations]


def _by_bytes(run: TrainRun) -> Points:
    """Steps that send nothing but a few messages stay at zero."""
    return [
        (each.bytes_sent / 1e6 if each.bytes_sent >= _FEWEST_BYTES * each.step else 0.0, each.loss)
        for each in run.evaluations
    ]


def _by_step(values: Sequence[float]) -> Points:
    return [(step + 1.0, value) for step, value in enumerate(values)]


def _thinned(points: Points) -> Points:
    stride = max(1, len(points) // _MOST_POINTS)
    return [*points[:-1:stride], *points[-1:]]


# ---- bars -----------------------------------------------------------------------------------


def _step_bar(row: RaceRow, rows: Sequence[RaceRow]) -> Bar:
    idle = max((each.median for each in rows if each.spec == "noop"), default=0.0)
    compute = min(idle, row.median)
    rest, busy = row.median - compute, sum(row.stages.values())
    parts = [(0, compute)]
    if busy > 0:
        times = [row.stages.get(stage, 0.0) for stage in STAGES]
        parts += [(number, rest * time / busy) for number, time in enumerate(times, 1)]
    else:
        parts.append((len(_PARTS) - 1, rest))
    milliseconds = [(part, 1e3 * seconds) for part, seconds in parts]
    return Bar(row.label, milliseconds, f"{1e3 * row.median:.0f} ms", is_ours(row.spec))
