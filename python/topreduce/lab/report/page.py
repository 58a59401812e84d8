"""One page without anything to load: verdict, charts, tables; light and dark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from topreduce.lab.report.charts import (
    loss_charts,
    search_charts,
    step_by_step_charts,
    step_charts,
)
from topreduce.lab.report.palette import COLOURS, DARK, LIGHT, variables
from topreduce.lab.report.results import Results, machine_words
from topreduce.lab.report.tables import Grid, grids, is_ours
from topreduce.lab.report.verdict import verdict

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
th:first-child, td:first-child { text-align: left; min-width: 13em; overflow-wrap: anywhere; }
th { font-weight: 600; vertical-align: bottom; } .ours td { font-weight: 600; }
svg { width: 100%; height: auto; } text { fill: var(--ink); font: 12px system-ui, sans-serif; }
text.axis { fill: var(--dim); font-size: 13px; } text.name { font-weight: 600; }
.grid { stroke: var(--rule); fill: none; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .line.ours { stroke-width: 3.5; }
.dashed { stroke-dasharray: 6 4; }
.level { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 3 3; fill: none; }
.verdict { color: var(--ink); font-size: 1.05rem; font-weight: 600; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0;
  margin: .2rem 0; }
.legend li { color: var(--ink); font-size: .85rem; }
.legend i { display: inline-block; width: 1.3rem; margin-right: .4rem; border-top: 2px solid;
  vertical-align: middle; }
i.ours { border-top-width: 4px; } i.dashed { border-top-style: dashed; }
i.part { border-top-width: .6rem; }
pre { white-space: pre-wrap; border-left: 3px solid var(--rule); padding-left: .8rem;
  font: .85rem/1.45 ui-monospace, monospace; }
"""


def page(several: Sequence[Results]) -> str:
    """The whole page for one run, or for several side by side."""
    colours = "\n".join(
        f".line.s{n} {{ stroke: var(--s{n}); }} .fill.s{n} {{ fill: var(--s{n}); }} "
        f"i.s{n} {{ border-color: var(--s{n}); }}"
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
        if told := verdict(results):
            yield f'<p class="verdict">{escape(told)}</p>'
    for results in several:
        load = results.workload
        yield f"<p>{escape(results.network)}, {escape(load['model'])}, {load['batch']} examples "
        yield f"per rank; {escape(results.date)}. {escape(machine_words(results))}</p>"
        yield f"<p><code>{escape(results.command)}</code></p>"
    yield "<p>Bold and thick: methods of topreduce. The others are what they are compared with.</p>"
    yield from loss_charts(several)
    yield from step_charts(several)
    for results in several:
        for grid in grids(results):
            yield from _table(grid)
    yield from search_charts(several)
    yield from step_by_step_charts(several)
    yield from _samples(several)


def _table(grid: Grid) -> Iterator[str]:
    yield f'<h2>{escape(grid.title)}</h2>\n<div class="wide"><table>'
    yield "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in grid.headings) + "</tr>"
    for row in grid.rows:
        yield '<tr class="ours">' if is_ours(row) else "<tr>"
        yield "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</table></div>"
    for note in grid.notes:
        yield f"<p>{escape(note)}</p>"


def _samples(several: Sequence[Results]) -> Iterator[str]:
    for results in several:
        for run in results.runs:
            if run.sample:
                yield f"<h2>Written by the model trained with {escape(run.label)}</h2>"
                yield f"<pre>{escape(run.sample)}</pre>"
