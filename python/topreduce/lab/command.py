"""The command `topreduce lab`: race, train, report, plot."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from rich.console import Console

from topreduce.lab.arguments import (
    RACE_METHODS,
    TRAIN_METHODS,
    make_parser,
    methods,
    network,
    workload,
)
from topreduce.lab.experiments import runs
from topreduce.lab.experiments.launch import RankError
from topreduce.lab.experiments.race import RaceOptions, with_again
from topreduce.lab.experiments.train import TrainOptions
from topreduce.lab.network.cluster import become_root
from topreduce.lab.network.namespaces import ClusterError
from topreduce.lab.report import page as report
from topreduce.lab.report.markdown import markdown
from topreduce.lab.report.plot import loss_plot
from topreduce.lab.report.results import RESULTS, Results, load, named, new_folder, save
from topreduce.lab.report.tables import grids, rich_table
from topreduce.lab.report.verdict import verdict

_WIDTH_OF_LOGS = 110


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if it could not be done, 2 if the command line was wrong."""
    asked = make_parser().parse_args(argv)
    asked.argv = list(argv)
    return guarded(
        lambda: _ACTIONS[asked.command](
            asked, make_console(sys.stderr if asked.json else sys.stdout)
        ),
        f"lab {asked.command}",
    )


def make_console(file: TextIO) -> Console:
    """For people to read; in a file with room for the tables."""
    made = Console(file=file)
    return made if made.is_terminal else Console(file=file, width=_WIDTH_OF_LOGS)


def guarded(action: Callable[[], None], name: str) -> int:
    """Runs an action of the lab; its errors become words and an exit code."""
    try:
        action()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"topreduce {name}: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"topreduce {name}: {error}", file=sys.stderr)
        return 2
    except (ClusterError, RankError) as error:
        print(f"topreduce {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; no process and no interface is left behind", file=sys.stderr)
        return 130
    return 0


def publish(console: Console, results: Results, folder: Path) -> Path:
    """Answer and tables on the terminal, results.json and report.html in the folder; returns the
    page.
    """
    _show(console, results)
    save(results, folder / RESULTS)
    page = folder / "report.html"
    page.write_text(report.page([results]))
    console.print(f"{folder / RESULTS}\n{page}", highlight=False, soft_wrap=True)
    return page


# ---- race -----------------------------------------------------------------------------------


def _race(asked: argparse.Namespace, console: Console) -> None:
    local = [each.label for each in methods(asked, RACE_METHODS) if each.is_local]
    if local:
        raise ValueError(
            f"{', '.join(local)}: for `lab train` only, as most of its steps send nothing"
        )
    options = RaceOptions(
        workload=workload(asked),
        methods=with_again(methods(asked, RACE_METHODS)),
        rounds=asked.rounds,
        steps=asked.turn,
    )
    wanted = network(asked)
    _become_root(asked)
    folder = new_folder(asked.out, "race")
    _finish(asked, console, runs.race(console, wanted, options, _command(asked)), folder)


def _train(asked: argparse.Namespace, console: Console) -> None:
    options = TrainOptions(
        workload=workload(asked),
        methods=methods(asked, TRAIN_METHODS),
        seeds=asked.seeds,
        steps=asked.steps,
        seconds=asked.seconds,
        target_loss=asked.target_loss,
        patience=asked.patience,
        evaluate_every=asked.evaluate_every,
        optimizer=asked.optimizer,
        learning_rate=asked.learning_rate,
        schedule=asked.schedule,
    )
    clock = asked.clock or ("real" if asked.compute is None else "race")
    if asked.seconds is not None and clock == "race":
        raise ValueError("--seconds goes with --clock real: it stops by the time that passes")
    if asked.compute is not None and clock == "real":
        raise ValueError(
            "--compute goes with --clock race: only the race waits instead of computing"
        )
    wanted = network(asked)
    _become_root(asked)
    folder = new_folder(asked.out, "train")
    try:
        results = runs.train(console, wanted, options, clock, asked.rounds, _command(asked), folder)
    except KeyboardInterrupt:
        if (kept := folder / RESULTS).exists():
            print(f"the trainings that ended are in {kept}: topreduce lab report", file=sys.stderr)
        raise
    _finish(asked, console, results, folder)


def _report(asked: argparse.Namespace, console: Console) -> None:
    files: list[Path] = [each / RESULTS if each.is_dir() else each for each in asked.files]
    several = [load(file) for file in files]
    if asked.markdown:
        print("\n\n".join(markdown(results) for results in several))
        return
    if len(several) > 1:
        names = _names(files)
        several = [named(each, name) for each, name in zip(several, names, strict=True)]
    for results in several:
        _show(console, results)
    page: Path = asked.out / "report.html" if asked.out.is_dir() else asked.out
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(report.page(several))
    console.print(page, highlight=False, soft_wrap=True)
    if asked.json:
        print(json.dumps([asdict(each) for each in several], indent=1))


def _plot(asked: argparse.Namespace, console: Console) -> None:
    if asked.out.suffix != ".svg":
        raise ValueError(f"--out {asked.out}: plot draws SVG; name the file so, as in loss.svg")
    drawn = loss_plot(load(asked.file))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(drawn)
    console.print(asked.out, highlight=False, soft_wrap=True)


def _names(files: Sequence[Path]) -> list[str]:
    """The shortest names that tell the files apart."""
    for name in (lambda file: file.stem, lambda file: file.resolve().parent.name, str):
        names = [name(file) for file in files]
        if len(set(names)) == len(names):
            return names
    return [f"{number}" for number, _ in enumerate(files, 1)]


def _show(console: Console, results: Results) -> None:
    """The answer, and the tables with their notes."""
    if told := verdict(results):
        console.print(told, style="bold", highlight=False)
    for grid in grids(results):
        console.print(rich_table(grid))
        console.print("\n".join(grid.notes), style="dim", highlight=False)
        console.print()


def _finish(asked: argparse.Namespace, console: Console, results: Results, folder: Path) -> None:
    publish(console, results, folder)
    if asked.json:
        print(json.dumps(asdict(results), indent=1))


def _become_root(asked: argparse.Namespace) -> None:
    if not asked.local:
        become_root("topreduce", ["lab", *asked.argv])


def _command(asked: argparse.Namespace) -> str:
    return shlex.join(["topreduce", "lab", *asked.argv])


_ACTIONS: dict[str, Callable[[argparse.Namespace, Console], None]] = {
    "race": _race,
    "train": _train,
    "report": _report,
    "plot": _plot,
}
