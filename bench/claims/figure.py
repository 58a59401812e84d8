"""Charts of the lab, by label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from topreduce.lab.report.palette import COLOURS
from topreduce.lab.report.picture import picture
from topreduce.lab.report.svg import Scale, Series, line_chart


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
        return picture(self.title, chart, legend=series)


def _is_dashed(label: str) -> bool:
    return label.startswith(("bound", "paper", "normal", "straight", "1 -", "(1 -", "k", "1/N"))
