"""The colours of page and pictures, on light and on dark paper."""

from __future__ import annotations

COLOURS = 8  # of lines and bars
LIGHT = {
    "paper": "#fdfdfc",
    "ink": "#1c1e21",
    "dim": "#5c6269",
    "rule": "#dddfe2",
    "s0": "#2f6db3",
    "s1": "#c8501e",
    "s2": "#15825f",
    "s3": "#a3478f",
    "s4": "#8a6a00",
    "s5": "#0b7f96",
    "s6": "#6f58c9",
    "s7": "#83898f",
}
DARK = {
    "paper": "#17191c",
    "ink": "#e6e7e8",
    "dim": "#a3a9b0",
    "rule": "#373b40",
    "s0": "#6ba6ea",
    "s1": "#f08a5a",
    "s2": "#4fc29b",
    "s3": "#d98bc8",
    "s4": "#d1ae3d",
    "s5": "#4dbdd3",
    "s6": "#a797f2",
    "s7": "#9aa0a6",
}


def variables(palette: dict[str, str]) -> str:
    """As custom properties of CSS."""
    return " ".join(f"--{name}: {value};" for name, value in palette.items())


def plain_style() -> str:
    """Of a picture that is a file of its own: without custom properties, which not all programs
    that draw SVG know.
    """
    shape = (
        ".grid,.line,.level{fill:none}.line{stroke-width:2;stroke-linejoin:round}"
        ".line.ours{stroke-width:3.5}.dashed{stroke-dasharray:6 4}"
        ".level{stroke-dasharray:3 3}text.name{font-weight:600}"
    )
    dark = f"@media (prefers-color-scheme:dark){{{_inks(DARK)}}}"
    return shape + _inks(LIGHT) + dark


def _inks(palette: dict[str, str]) -> str:
    inks = "".join(
        f".line.s{n}{{stroke:{palette[f's{n}']}}}text.s{n}{{fill:{palette[f's{n}']}}}"
        for n in range(COLOURS)
    )
    return (
        f".paper{{fill:{palette['paper']}}}text{{fill:{palette['ink']}}}"
        f"text.axis,text.note{{fill:{palette['dim']}}}.grid{{stroke:{palette['rule']}}}"
        f".level{{stroke:{palette['ink']}}}{inks}"
    )
