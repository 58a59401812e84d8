"""Charts of the lab as files of their own: with colours, a legend and a title."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from topreduce.lab.report.svg import COLOURS, Scale, Series, line_chart

_WIDTH, _CHART, _TITLE, _LINE = 680, 340, 26, 18
_PER_LINE = 3
_INKS = ("#2f6db3", "#c8501e", "#15825f", "#a3478f", "#8a6a00", "#0b7f96", "#6f58c9", "#83898f")


@dataclass(frozen=True)
class Figure:
    """Lines by label; bounds, and what a paper says, are dashed."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]]
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"

    def svg(self) -> str:
        """A whole file."""
        series = [
            Series(label, points, number % COLOURS + (COLOURS if _is_dashed(label) else 0))
            for number, (label, points) in enumerate(self.lines)
        ]
        chart = line_chart(self.x_label, self.y_label, series, self.x_scale, self.y_scale)
        rows = -(-len(series) // _PER_LINE)
        height = _TITLE + _CHART + rows * _LINE + 8
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'font-family="system-ui, sans-serif" font-size="12">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{_style()}</style>",
            f'<rect width="{_WIDTH}" height="{height}" fill="#fdfdfc"/>',
            f'<text x="12" y="18" font-weight="600">{escape(self.title)}</text>',
            f'<svg y="{_TITLE}" width="{_WIDTH}" height="{_CHART}"{chart[4:]}',
        ]
        for number, each in enumerate(series):
            x = 62 + number % _PER_LINE * 205
            y = _TITLE + _CHART + number // _PER_LINE * _LINE + 10
            dashed = " dashed" if each.colour >= COLOURS else ""
            kind = f"line s{each.colour % COLOURS}{dashed}"
            parts.append(f'<path class="{kind}" d="M{x} {y - 4}h22"/>')
            parts.append(f'<text x="{x + 28}" y="{y}">{escape(each.label)}</text>')
        return "\n".join([*parts, "</svg>"]) + "\n"


def _is_dashed(label: str) -> bool:
    return label.startswith(("bound", "paper", "normal", "straight", "1 -", "(1 -", "k", "1/N"))


def _style() -> str:
    inks = "".join(f".line.s{number}{{stroke:{ink}}}" for number, ink in enumerate(_INKS))
    return (
        "text{fill:#1c1e21}text.axis{fill:#5c6269}.grid{stroke:#dddfe2;fill:none}"
        ".line{fill:none;stroke-width:2;stroke-linejoin:round}.dashed{stroke-dasharray:6 4}" + inks
    )
