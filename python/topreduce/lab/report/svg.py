"""Charts as SVG: lines and stacked bars. Colours come from what they stand in, by class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from topreduce.lab.report.palette import COLOURS

WIDTH, HEIGHT = 680, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 12, 46
_BAR, _BAR_GAP, _NAMES = 20, 12, 240
_LONGEST_NAME, _END_OF_NAME = 28, 10  # characters that fit there
_MOST_TICKS = 7
_LETTER, _LINE = 7.7, 15.0  # room that a name takes at the end of its line: a letter, the height
_NEAR = 24.0  # to the edge
_ROUNDS = 200  # of moving names apart

Scale = Literal["linear", "log"]


@dataclass(frozen=True)
class Series:
    """A line; `colour` counts from 0, and is dashed from COLOURS on."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int
    ours: bool = False  # drawn thicker


@dataclass(frozen=True)
class Bar:
    """Parts side by side, each with the number of its colour, and words at their end."""

    label: str
    parts: Sequence[tuple[int, float]]
    words: str
    ours: bool = False  # its name is bold


def line_chart(
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    x_scale: Scale,
    y_scale: Scale = "linear",
    levels: Sequence[tuple[str, float]] = (),
    names: Literal["elsewhere", "at lines"] = "elsewhere",
    top: float = math.inf,
) -> str:
    """Lines over common axes, and `levels` across, with their names; points that are not finite
    are left out, and lines cut off above `top`. `names`: those of the lines stand at their ends, or
    the caller shows them.

    On a logarithmic axis zero is the left edge; points at or below zero cannot be shown upwards.
    """
    finite = [(each, _finite(each.points, y_scale)) for each in series]
    shown = [(each, points) for each, points in finite if is_drawn(points, top)]
    ys = [min(y, top) for _, points in shown for _, y in points] + [level for _, level in levels]
    xs = [x for _, points in shown for x, _ in points if x_scale == "linear" or x > 0]
    if not xs:
        return ""
    if x_scale == "linear" and 0 < min(xs) < max(xs) / 5:
        xs.append(0.0)  # so near that it belongs to the picture
    if x_scale == "log":
        xs.append(min(xs) / 2)
        zero = (
            ", the left edge is 0" if any(x <= 0 for _, points in shown for x, _ in points) else ""
        )
        x_label += f" (logarithmic{zero})"
    if y_scale == "log":
        y_label += " (logarithmic)"
    longest = max(len(each.label) for each, _ in shown) if names == "at lines" else 0
    right = WIDTH - _RIGHT - _LETTER * longest
    x_axis = _Axis(min(xs), max(xs), _LEFT, right, x_scale)
    y_axis = _Axis(min(ys), max(ys), HEIGHT - _BOTTOM, _TOP, y_scale)
    parts = [_open(WIDTH, HEIGHT, f"{y_label} against {x_label}")]
    for tick in y_axis.ticks():
        y = y_axis.place(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right:.1f}"/>')
        parts.append(_text(_LEFT - 6, y + 4, _number(tick), "end"))
    for tick in x_axis.ticks():
        x = x_axis.place(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>')
        parts.append(_text(x, HEIGHT - _BOTTOM + 17, _number(tick), "middle"))
    edge = y_axis.place(max(ys))
    for each, points in shown:
        path = _path([(x_axis.place(x), y_axis.place(y)) for x, y in points], edge)
        label = escape(each.label)
        parts.append(f'<path class="{line_class(each)}" d="{path}"><title>{label}</title></path>')
    for name, level in levels:
        y = y_axis.place(level)
        parts.append(f'<path class="level" d="M{_LEFT} {y:.1f}H{right:.1f}"/>')
        # Losses fall: below a level, at the left, nothing is drawn.
        below = y + _LINE < HEIGHT - _BOTTOM
        parts.append(_text(_LEFT + 6, y + 13 if below else y - 5, name, "start"))
    if names == "at lines":
        ends = [(each, points[-1]) for each, points in shown]
        places = [(each, x_axis.place(x), y_axis.place(y)) for each, (x, y) in ends]
        parts += _names(places, right)
    middle = (_LEFT + right) / 2
    parts.append(_text(middle, HEIGHT - 8, x_label, "middle", "axis"))
    height = (_TOP + HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<g transform="translate(14 {height:.0f}) rotate(-90)">'
        f"{_text(0, 0, y_label, 'middle', 'axis')}</g>"
    )
    return "\n".join([*parts, "</svg>"])


def is_drawn(points: Sequence[tuple[float, float]], top: float = math.inf) -> bool:
    """Whether a chart that ends at `top` shows anything of this line."""
    return any(y <= top for _, y in points[1:])


def line_class(series: Series) -> str:
    """Of its path."""
    kinds = [f"line s{series.colour % COLOURS}"]
    kinds += ["dashed"] if series.colour >= COLOURS else []
    kinds += ["ours"] if series.ours else []
    return " ".join(kinds)


def _path(places: Sequence[tuple[float, float]], edge: float) -> str:
    """Through the places, without what lies above the edge, where y is smaller."""
    path, before = "", None
    for x, y in places:
        if before is not None and (y < edge) != (before[1] < edge):
            share = (edge - before[1]) / (y - before[1])
            crossing = f"{before[0] + share * (x - before[0]):.1f} {edge:.1f}"
            path += f"L{crossing}" if y < edge else f"M{crossing}"
        if y >= edge:
            path += f"{'M' if before is None else 'L'}{x:.1f} {y:.1f}"
        before = (x, y)
    return path


def _names(ends: Sequence[tuple[Series, float, float]], edge: float) -> list[str]:
    """Each at the end of its line, those that would cover each other apart but in their order; of
    lines with one name the last has it. Lines that all but reach `edge` have theirs there.
    """
    last = {each.label: (each, edge if x > edge - _NEAR else x, y) for each, x, y in ends}
    ordered = sorted(last.values(), key=lambda end: end[2])
    heights = [y for _, _, y in ordered]
    for _ in range(_ROUNDS):
        for upper, (above, x, _) in enumerate(ordered):
            for lower, (_, other, _) in list(enumerate(ordered))[upper + 1 :]:
                width = _LETTER * max(len(above.label), len(ordered[lower][0].label))
                missing = _LINE - (heights[lower] - heights[upper])
                if abs(x - other) < width and missing > 0:
                    heights[upper] -= missing / 2
                    heights[lower] += missing / 2
        heights = [min(max(height, _TOP), HEIGHT - _BOTTOM) for height in heights]
    return [
        _text(x + 6, height + 4, each.label, "start", f"name s{each.colour % COLOURS}")
        for (each, x, _), height in zip(ordered, heights, strict=True)
    ]


def bar_chart(x_label: str, bars: Sequence[Bar], scale: Scale = "linear") -> str:
    """Bars from zero, one below the other, with their words at the end.

    A logarithmic axis has no zero, and a length on it no meaning: there each is a point.
    """
    totals = [sum(max(0.0, value) for _, value in bar.parts) for bar in bars]
    positive = [total for total in totals if total > 0]
    if not positive:
        return ""
    height = _TOP + len(bars) * (_BAR + _BAR_GAP) + _BOTTOM
    low = 0.0 if scale == "linear" else 10 ** math.floor(math.log10(min(positive)))
    axis = _Axis(low, max(positive), _NAMES, WIDTH - 150, scale)
    parts = [_open(WIDTH, height, x_label)]
    for tick in axis.ticks():
        x = axis.place(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{height - _BOTTOM}"/>')
        parts.append(_text(x, height - _BOTTOM + 17, _number(tick), "middle"))
    for number, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        y = _TOP + _BAR_GAP / 2 + number * (_BAR + _BAR_GAP)
        kind = "name" if bar.ours else "tick"
        parts.append(_text(_NAMES - 8, y + _BAR / 2 + 4, _short(bar.label), "end", kind))
        if scale == "log" and total > 0:
            x, colour = axis.place(total), bar.parts[0][0]
            parts.append(
                f'<circle class="fill s{colour % COLOURS}" cx="{x:.1f}" '
                f'cy="{y + _BAR / 2:.1f}" r="{_BAR / 4:.0f}"/>'
            )
        start = low
        for colour, value in bar.parts if scale == "linear" else ():
            if value <= 0:
                continue
            left, right = axis.place(start), axis.place(start + value)
            parts.append(
                f'<rect class="fill s{colour % COLOURS}" x="{left:.1f}" y="{y:.1f}" '
                f'width="{right - left:.1f}" height="{_BAR}"/>'
            )
            start += value
        parts.append(_text(axis.place(max(total, low)) + 8, y + _BAR / 2 + 4, bar.words, "start"))
    middle = (_NAMES + WIDTH - 150) / 2
    if scale == "log":
        x_label += " (logarithmic)"
    parts.append(_text(middle, height - 8, x_label, "middle", "axis"))
    return "\n".join([*parts, "</svg>"])


class _Axis:
    """From values to places in the picture."""

    def __init__(self, low: float, high: float, first: float, last: float, scale: Scale) -> None:
        self._log = scale == "log"
        if high <= low:
            high = low * 10 if self._log else low + (abs(low) or 1.0)
        self._low, self._high = low, high
        self._first, self._last = first, last

    def place(self, value: float) -> float:
        low, high = self._low, self._high
        if self._log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        return self._first + (value - low) / (high - low) * (self._last - self._first)

    def ticks(self) -> list[float]:
        if self._log:
            powers = range(math.floor(math.log10(self._low)), math.ceil(math.log10(self._high)) + 1)
            factors = (1, 2, 5) if self._high < 1000 * self._low else (1,)
            all_ticks = [factor * 10.0**power for power in powers for factor in factors]
        else:
            rough = (self._high - self._low) / (_MOST_TICKS - 1)
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
            first = math.ceil(self._low / step - 1e-9)
            all_ticks = [step * (first + number) for number in range(_MOST_TICKS + 1)]
        slack = 1e-9 * (self._high - self._low)
        return [tick for tick in all_ticks if self._low - slack <= tick <= self._high + slack]


def _finite(points: Sequence[tuple[float, float]], y_scale: Scale) -> list[tuple[float, float]]:
    floor = 0.0 if y_scale == "log" else -math.inf
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and y > floor]


def _open(width: float, height: float, label: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'


def _text(x: float, y: float, words: str, anchor: str, kind: str = "tick") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(words)}</text>'


def _number(value: float) -> str:
    return f"{0.0 if abs(value) < 1e-12 else value:,.6g}"


def _short(label: str) -> str:
    """Its start and its end, where settings and "(A/A)" stand."""
    if len(label) <= _LONGEST_NAME:
        return label
    return f"{label[: _LONGEST_NAME - 1 - _END_OF_NAME]}…{label[-_END_OF_NAME:]}"
