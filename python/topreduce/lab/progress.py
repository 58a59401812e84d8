"""Progress of long work: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int, str], None]

SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def progress(console: Console, label: str, steps: int) -> Iterator[Advance]:
    """Give a function `advance(steps_done, note)` to call after every step."""
    if console.is_terminal:
        with _bar(console, label, steps) as advance:
            yield advance
    else:
        yield _lines(console, label, steps)


@contextlib.contextmanager
def _bar(console: Console, label: str, steps: int) -> Iterator[Advance]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(label, total=steps, note="starting")
        yield lambda done, note: bar.update(task, completed=done, note=note)


def _lines(console: Console, label: str, steps: int) -> Advance:
    begin: tuple[float, int] | None = None
    last_line = 0.0

    def advance(done: int, note: str) -> None:
        nonlocal begin, last_line
        now = time.monotonic()
        if begin is None:  # the time before the first step tells nothing about the others
            begin, last_line = (now, done), now
        if done < steps and now - last_line < SECONDS_BETWEEN_LINES:
            return
        last_line = now
        line = f"{label}: step {done} of {steps}, {note}"
        if done < steps:
            seconds_per_step = (now - begin[0]) / (done - begin[1])
            line += f", {seconds_per_step * (steps - done):.0f} s left"
        console.print(line, highlight=False, soft_wrap=True)

    return advance
