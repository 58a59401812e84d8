"""What the scripts of this folder share: options, progress, results that are kept, pages.

A claim is a list of runs, each with a name that says all that it depends on. What a run gives is
kept in results/<claim>.json at once, so that a claim that was stopped goes on where it was, and
figures and tables can be drawn anew without measuring. `--quick` makes everything small and keeps
it in build/claims/, `--fresh` measures anew.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figure import Figure
from rich.console import Console

from topreduce.lab.experiments.progress import progress

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """`make` measures; `name` says what."""

    name: str
    make: Callable[[], Row]


class Claim:
    """One claim on the command line."""

    def __init__(self, name: str, about: str) -> None:
        parser = argparse.ArgumentParser(prog=f"./run claims {name}", description=about)
        parser.add_argument("--quick", action="store_true", help="small sizes, in build/claims/")
        parser.add_argument("--fresh", action="store_true", help="measure anew what is kept")
        parser.add_argument(
            "--draw", action="store_true", help="draw what is kept, measure nothing"
        )
        asked = parser.parse_args()
        self.name, self.quick, self.draw = name, asked.quick, asked.draw
        results = ROOT / ("build/claims" if self.quick else "bench/claims/results")
        self._file = results / f"{name}.json"
        self._pictures = results if self.quick else ROOT / "docs/evidence"
        for folder in (results, self._pictures):
            folder.mkdir(parents=True, exist_ok=True)
        kept = self._file.exists() and not asked.fresh
        self._kept: dict[str, Row] = json.loads(self._file.read_text())["runs"] if kept else {}

    def measure(self, runs: Sequence[Run]) -> dict[str, Row]:
        """What all of them give, by name; measures those that are not kept."""
        missing = [run for run in runs if run.name not in self._kept]
        if missing and not self.draw:
            with progress(Console(), [self.name], len(missing), "runs") as advance:
                advance(self.name, 0, "")
                for done, run in enumerate(missing, 1):
                    started = time.perf_counter()
                    self._kept[run.name] = run.make()
                    self._save()
                    advance(self.name, done, f"{run.name}: {time.perf_counter() - started:.0f} s")
        return {run.name: self._kept[run.name] for run in runs if run.name in self._kept}

    def _save(self) -> None:
        page = {
            "claim": self.name,
            "command": f"./run claims {self.name}{' --quick' if self.quick else ''}",
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        }
        head = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in page.items())
        runs = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(rounded(row))}" for name, row in self._kept.items()
        )  # a line for each
        self._file.write_text(f'{{{head},\n"runs": {{\n{runs}\n}}}}\n')

    def picture(self, figure: Figure, name: str = "") -> None:
        """Keeps it as docs/evidence/<claim>[_name].svg."""
        file = self._pictures / f"{self.name}{'_' if name else ''}{name}.svg"
        file.write_text(figure.svg())

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[object]], name: str = "") -> None:
        """Prints a table, and puts it into its place in docs/evidence.md."""
        lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
        if not lines:
            return
        lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *lines]
        text = "\n".join(lines)
        print(f"\n{text}")
        page = ROOT / "docs/evidence.md"
        label = f"{self.name}{' ' if name else ''}{name}"
        begin, end = f"<!-- {label} -->\n", f"\n<!-- end of {label} -->"
        written = page.read_text() if page.exists() else ""
        if self.quick or begin not in written:
            return
        before, rest = written.split(begin, 1)
        page.write_text(before + begin + text + end + rest.split(end, 1)[1])


def rounded(value: Any, digits: int = 6) -> Any:
    """The same with numbers that are short enough to read."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {key: rounded(each, digits) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each, digits) for each in value]
    return value


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Mean, and lowest to highest."""
    if len(values) == 1:
        return format(values[0], form)
    mean = format(statistics.fmean(values), form)
    return f"{mean} ({format(min(values), form)} to {format(max(values), form)})"
