"""The table of a run for a README: `topreduce lab report --markdown`."""

from __future__ import annotations

import textwrap

from topreduce.lab.report.names import in_words
from topreduce.lab.report.results import Results, machine_words
from topreduce.lab.report.tables import Grid, race_grid, train_grid
from topreduce.lab.report.verdict import noise

_WIDEST = 98
_CLOCKS = {"real": "on the real clock", "race": "on the clock of a race"}


def markdown(results: Results) -> str:
    """What was measured, where and when; the table; the command. ValueError if nothing was."""
    if not results.race and not results.runs:
        raise ValueError("no race and no training among these results")
    grid = train_grid(results) if results.runs else race_grid(results)
    what = f"Training {_CLOCKS[results.clock]}" if results.runs else "Steps"
    load, parameters = results.workload, (results.runs or results.race)[0].parameters
    words = [f"{what}: {load['model']}, {parameters:,} parameters, {results.network}."]
    words += grid.notes[:1] if results.runs else []
    words.append(f"{machine_words(results)}; {results.date}.")
    again = noise(results.race)
    if again is not None:
        words.append(f"The same step measured twice in the race: A/A {again:.2f}.")
    return "\n".join(
        [" ".join(words), "", *_table(grid), "", "```", *_wrapped(results.command), "```"]
    )


def _table(grid: Grid) -> list[str]:
    lines = [grid.headings, ["---"] * len(grid.headings)]
    lines += [[in_words(row[0]), *row[1:]] for row in grid.rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _wrapped(command: str) -> list[str]:
    """Lines that a page has room for; a shell takes them as one."""
    pieces = textwrap.wrap(command, _WIDEST, break_long_words=False, break_on_hyphens=False)
    return [f"{piece} \\" for piece in pieces[:-1]] + pieces[-1:]
