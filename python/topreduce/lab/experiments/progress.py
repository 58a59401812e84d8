"""Progress of long work: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[str, int, str], None]

SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def progress(console: Console, labels: Sequence[str], total: int, unit: str) -> Iterator[Advance]:
    """Give a function `advance(label, done, note)` to call as the work goes on."""
    if console.is_terminal:
        with _bars(console, labels, total, unit) as advance:
            yield advance
    else:
        lines = {label: _Lines(console, label, total, unit) for label in labels}
        yield lambda label, done, note: lines[label].advance(done, note)


@contextlib.contextmanager
def _bars(console: Console, labels: Sequence[str], total: int, unit: str) -> Iterator[Advance]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed}} of {total} {unit}"),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    with Progress(*columns, console=console) as bars:
        tasks = {label: bars.add_task(label, total=total, note="", start=False) for label in labels}

        def advance(label: str, done: int, note: str) -> None:
            bars.start_task(tasks[label])
            bars.update(tasks[label], completed=done, note=note)

        yield advance


class _Lines:
    def __init__(self, console: Console, label: str, total: int, unit: str) -> None:
        self._console = console
        self._label = label
        self._total = total
        self._unit = unit
        self._begin: tuple[float, int] | None = None
        self._last_line = 0.0

    def advance(self, done: int, note: str) -> None:
        now = time.monotonic()
        if self._begin is None:  # the time before the first tells nothing about the others
            self._begin, self._last_line = (now, done), now
        if done < self._total and now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        line = f"{self._label}: {done} of {self._total} {self._unit}, {note}"
        if done < self._total:
            seconds_each = (now - self._begin[0]) / max(1, done - self._begin[1])
            line += f", {seconds_each * (self._total - done):.0f} s left"
        self._console.print(line, highlight=False, soft_wrap=True)
