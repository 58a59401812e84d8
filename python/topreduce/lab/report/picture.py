"""A chart as a file of its own: with a title, colours for light and dark paper, and notes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from topreduce.lab.report.palette import plain_style
from topreduce.lab.report.svg import HEIGHT, WIDTH, Series, line_class

_TITLE, _LINE = 26, 18
_PER_LINE = 3


def picture(
    title: str, chart: str, legend: Sequence[Series] = (), notes: Sequence[str] = ()
) -> str:
    """An SVG file; `legend`: lines to name below the chart."""
    rows = -(-len(legend) // _PER_LINE) + len(notes)
    height = _TITLE + HEIGHT + rows * _LINE + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f"<style>{plain_style()}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text x="12" y="18" font-weight="600">{escape(title)}</text>',
        f'<svg y="{_TITLE}" width="{WIDTH}" height="{HEIGHT}"{chart.removeprefix("<svg")}',
    ]
    y = _TITLE + HEIGHT + 10
    for number, each in enumerate(legend):
        x = 62 + number % _PER_LINE * 205
        below = y + number // _PER_LINE * _LINE
        parts.append(f'<path class="{line_class(each)}" d="M{x} {below - 4}h22"/>')
        parts.append(f'<text x="{x + 28}" y="{below}">{escape(each.label)}</text>')
    y += -(-len(legend) // _PER_LINE) * _LINE
    for number, note in enumerate(notes):
        parts.append(f'<text class="note" x="12" y="{y + number * _LINE}">{escape(note)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
