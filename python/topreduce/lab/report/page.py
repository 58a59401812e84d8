"""One page without anything to load: tables, charts, light and dark."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from html import escape

from topreduce.lab.experiments.race import RaceRow
from topreduce.lab.experiments.train import TrainRun
from topreduce.lab.report.palette import COLOURS, DARK, LIGHT, variables
from topreduce.lab.report.plot import to_reach
from topreduce.lab.report.results import Results, machine_words
from topreduce.lab.report.svg import Bar, Scale, Series, bar_chart, line_chart
from topreduce.lab.report.tables import Grid, grids
from topreduce.lab.report.verdict import verdict

_MOST_POINTS = 400
_FEWEST_BYTES = 1000  # of a step that are worth a bar: noop's barriers are not
_PARTS = ("compute", "look", "choose", "pack", "network", "unpack", "commit", "not ours")

_ROOT = (
    f":root {{ color-scheme: light dark; {variables(LIGHT)} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}"
)
_STYLE = """
body { background: var(--paper); color: var(--ink); max-width: 60rem; margin: 2rem auto;
  padding: 0 1.2rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
p, li { color: var(--dim); font-size: .9rem; margin: .25rem 0; }
code { font: .85rem/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; text-align: right; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
th:first-child, td:first-child { text-align: left; min-width: 9em; overflow-wrap: anywhere; }
th { font-weight: 600; }
svg { width: 100%; height: auto; } text { fill: var(--ink); font: 12px system-ui, sans-serif; }
text.axis { fill: var(--dim); font-size: 13px; } .grid { stroke: var(--rule); fill: none; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .dashed { stroke-dasharray: 6 4; }
.level { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 3 3; fill: none; }
.verdict { color: var(--ink); font-size: 1.05rem; font-weight: 600; }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; }
ul.legend li { color: var(--ink); font-size: .85rem; }
ul.legend i { display: inline-block; width: 1.1rem; height: .3rem; margin-right: .4rem;
  vertical-align: middle; }
pre { white-space: pre-wrap; border-left: 3px solid var(--rule); padding-left: .8rem;
  font: .85rem/1.45 ui-monospace, monospace; }
"""


def page(several: Sequence[Results]) -> str:
    """The whole page for one run, or for several side by side."""
    colours = "\n".join(
        f".line.s{n} {{ stroke: var(--s{n}); }} .fill.s{n} {{ fill: var(--s{n}); }} "
        f"i.s{n} {{ background: var(--s{n}); }}"
        for n in range(COLOURS)
    )
    body = "\n".join(_body(several))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>topreduce lab</title>\n<style>{_ROOT}{_STYLE}{colours}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _body(several: Sequence[Results]) -> Iterator[str]:
    yield "<h1>topreduce lab</h1>"
    for results in several:
        load = results.workload
        yield f"<p>{escape(results.date)}: {escape(results.network)}, {escape(load['model'])}, "
        yield f"{load['batch']} examples per rank. {escape(machine_words(results))}</p>"
        yield f"<p><code>{escape(results.command)}</code></p>"
    rows = [row for results in several for row in results.race]
    runs = [run for results in several for run in results.runs]
    for results in several:
        yield f'<p class="verdict">{escape(verdict(results))}</p>'
    if runs:
        yield from _training(several)
    if rows:
        yield from _steps(rows)
    for results in several:
        for grid in grids(results):
            yield from _table(grid)
    yield from _searches([row for row in rows if row.densities])
    if runs:
        yield from _over_time(runs)
        yield from _samples(runs)


# ---- training -------------------------------------------------------------------------------


def _training(several: Sequence[Results]) -> Iterator[str]:
    runs = [run for results in several for run in results.runs]
    levels = _levels(several)
    yield "<h2>Loss against time</h2>"
    if any(results.clock == "race" for results in several):
        yield "<p>Trained without the limit; the time of each step is that of the race.</p>"
    loss = "loss on held-out data"
    yield from _lines("seconds", loss, runs, _loss_by_seconds, levels=levels)
    yield "<h2>Loss against traffic</h2>"
    yield from _lines("MB sent by one host", loss, runs, _loss_by_bytes, "log", levels=levels)


def _levels(several: Sequence[Results]) -> list[tuple[str, float]]:
    """The losses to reach, with their names."""
    return list(dict.fromkeys(level for each in several for level in to_reach(each)))


def _over_time(runs: Sequence[TrainRun]) -> Iterator[str]:
    ours = [run for run in runs if run.density]
    if not ours:
        return
    curves: list[tuple[str, Callable[[TrainRun], list[float]]]] = [
        ("share of the entries that is sent", lambda run: run.density),
        ("seconds that backward() waited", lambda run: run.waited),
        ("share of the energy that is settled", lambda run: run.kept_energy),
        ("norm of what a rank owes", lambda run: run.owed_norm),
    ]
    for title, values in curves:
        if not any(values(run) for run in ours):
            continue
        yield f"<h2>{title[0].upper()}{title[1:]}</h2>"
        yield from _lines("step", title, ours, functools.partial(_by_step, values), all_runs=runs)


def _by_step(values: Callable[[TrainRun], list[float]], run: TrainRun) -> list[tuple[float, float]]:
    return [(step + 1.0, value) for step, value in enumerate(values(run))]


def _samples(runs: Sequence[TrainRun]) -> Iterator[str]:
    for run in runs:
        if run.sample:
            yield f"<h2>Written by the model trained with {escape(run.label)}</h2>"
            yield f"<pre>{escape(run.sample)}</pre>"


def _loss_by_seconds(run: TrainRun) -> list[tuple[float, float]]:
    return [(each.seconds, each.loss) for each in run.evaluations]


def _loss_by_bytes(run: TrainRun) -> list[tuple[float, float]]:
    return [(each.bytes_sent / 1e6, each.loss) for each in run.evaluations]


def _lines(
    x_label: str,
    y_label: str,
    runs: Sequence[TrainRun],
    points: Callable[[TrainRun], list[tuple[float, float]]],
    scale: Scale = "linear",
    all_runs: Sequence[TrainRun] = (),
    levels: Sequence[tuple[str, float]] = (),
) -> Iterator[str]:
    """A line for each run; runs that differ by their seed share colour and name."""
    labels = list(dict.fromkeys(run.label for run in all_runs or runs))
    series = [Series(run.label, _thinned(points(run)), labels.index(run.label)) for run in runs]
    yield line_chart(x_label, y_label, series, scale, levels=levels)
    shown = {run.label for run in runs}
    yield _legend([(labels.index(label), label) for label in labels if label in shown])


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    stride = max(1, len(points) // _MOST_POINTS)
    return [*points[:-1:stride], *points[-1:]]


# ---- steps ----------------------------------------------------------------------------------


def _steps(rows: Sequence[RaceRow]) -> Iterator[str]:
    yield "<h2>Where a step's time goes</h2>"
    yield "<p>Compute is the step of noop. Our stages run on a thread of their own, also while the "
    yield "backward pass goes on: what a step took longer than noop is divided among them in "
    yield "proportion to their times.</p>"
    yield bar_chart("milliseconds per step", [_step_bar(row, rows) for row in rows])
    yield _legend(list(enumerate(_PARTS)))
    yield "<h2>Traffic of a step</h2>"
    yield bar_chart(
        "MB sent by one host, in one step",
        [
            Bar(row.label, [(0, row.mean_bytes / 1e6)], f"{row.mean_bytes / 1e6:.3g} MB")
            for row in rows
            if row.mean_bytes >= _FEWEST_BYTES
        ],
        "log",
    )


def _searches(rows: Sequence[RaceRow]) -> Iterator[str]:
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
        series = [
            Series(row.label, _thinned([(i + 1.0, y) for i, y in enumerate(values(row))]), number)
            for number, row in enumerate(rows)
        ]
        yield line_chart("step", title, series, "linear")
    yield _legend([(number, row.label) for number, row in enumerate(rows)])


def _step_bar(row: RaceRow, rows: Sequence[RaceRow]) -> Bar:
    idle = max((each.median for each in rows if each.spec == "noop"), default=0.0)
    compute = min(idle, row.median)
    rest, busy = row.median - compute, sum(row.stages.values())
    parts = [(0, compute)]
    if busy > 0:
        stages = list(enumerate(_PARTS))[1:-1]
        parts += [(number, rest * row.stages.get(name, 0.0) / busy) for number, name in stages]
    else:
        parts.append((len(_PARTS) - 1, rest))
    return Bar(row.label, [(n, 1e3 * each) for n, each in parts], f"{1e3 * row.median:.0f} ms")


# ---- pieces ---------------------------------------------------------------------------------


def _table(grid: Grid) -> Iterator[str]:
    yield f'<h2>{escape(grid.title)}</h2>\n<div class="wide"><table>'
    yield "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in grid.headings) + "</tr>"
    for row in grid.rows:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</table></div>"
    for note in grid.notes:
        yield f"<p>{escape(note)}</p>"


def _legend(entries: Sequence[tuple[int, str]]) -> str:
    items = "".join(
        f'<li><i class="s{colour % COLOURS}"></i>{escape(label)}</li>' for colour, label in entries
    )
    return f'<ul class="legend">{items}</ul>'
