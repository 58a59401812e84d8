"""The command `topreduce lab`: race, train, report."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from topreduce.lab import report, runs
from topreduce.lab.cluster import become_root, parse_rates
from topreduce.lab.launch import RankError
from topreduce.lab.methods import parse_methods
from topreduce.lab.models import MODELS, Workload
from topreduce.lab.namespaces import ClusterError
from topreduce.lab.race import RaceOptions, with_again
from topreduce.lab.results import Results, load, named, new_folder, save
from topreduce.lab.tables import grids, rich_table
from topreduce.lab.train import TrainOptions

RACE_METHODS = "noop,dense,fp16,powersgd:1,powersgd:4,topk:density=0.01,ok_topk:density=0.01"
_WIDTH_OF_LOGS = 100
TRAIN_METHODS = "dense,powersgd:4,topk:density=0.01,ok_topk:density=0.01"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if it could not be done, 2 if the command line was wrong."""
    asked = _parser().parse_args(argv)
    asked.argv = list(argv)
    return guarded(
        lambda: asked.run(asked, make_console(stderr=asked.json)), f"lab {asked.command}"
    )


def make_console(stderr: bool = False) -> Console:
    """Where people read; `stderr` leaves standard output to machines."""
    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(stderr=stderr, width=_WIDTH_OF_LOGS)


def guarded(action: Callable[[], None], name: str) -> int:
    """Runs an action of the lab; its errors become words and an exit code."""
    try:
        action()
    except (ValueError, FileNotFoundError) as error:
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
    """Tables on the terminal, results.json and report.html in the folder; returns the page."""
    for grid in grids(results):
        console.print(rich_table(grid))
        console.print("\n".join(grid.notes), style="dim", highlight=False)
        console.print()
    save(results, folder / "results.json")
    page = folder / "report.html"
    page.write_text(report.page([results]))
    console.print(f"{folder / 'results.json'}\n{page}", highlight=False, soft_wrap=True)
    return page


# ---- race -----------------------------------------------------------------------------------


def _race(asked: argparse.Namespace, console: Console) -> None:
    options = RaceOptions(
        workload=_workload(asked),
        methods=with_again(parse_methods(asked.methods)),
        rounds=asked.rounds,
        steps=asked.turn,
    )
    network = _network(asked)
    _become_root(asked)
    folder = new_folder(asked.out, "race")
    _finish(asked, console, runs.race(console, network, options, _command(asked)), folder)


def _train(asked: argparse.Namespace, console: Console) -> None:
    options = TrainOptions(
        workload=_workload(asked),
        methods=parse_methods(asked.methods),
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
    if asked.seconds is not None and asked.clock == "race":
        raise ValueError("--seconds goes with --clock real: it stops by the time that passes")
    network = _network(asked)
    _become_root(asked)
    folder = new_folder(asked.out, "train")
    results = runs.train(console, network, options, asked.clock, asked.rounds, _command(asked))
    _finish(asked, console, results, folder)


def _report(asked: argparse.Namespace, console: Console) -> None:
    files: list[Path] = asked.files
    several = [load(file) for file in files]
    if len(several) > 1:
        names = _names(files)
        several = [named(each, name) for each, name in zip(several, names, strict=True)]
    for results in several:
        for grid in grids(results):
            console.print(rich_table(grid))
    asked.out.write_text(report.page(several))
    console.print(asked.out, highlight=False, soft_wrap=True)
    if asked.json:
        print(json.dumps([asdict(each) for each in several], indent=1))


def _names(files: Sequence[Path]) -> list[str]:
    """The shortest names that tell the files apart."""
    for name in (lambda file: file.stem, lambda file: file.resolve().parent.name, str):
        names = [name(file) for file in files]
        if len(set(names)) == len(names):
            return names
    return [f"{number}" for number, _ in enumerate(files, 1)]


def _finish(asked: argparse.Namespace, console: Console, results: Results, folder: Path) -> None:
    publish(console, results, folder)
    if asked.json:
        print(json.dumps(asdict(results), indent=1))


# ---- the command line -----------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="topreduce lab",
        description="An emulated cluster on this machine: does it help on your network?",
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    form = argparse.ArgumentDefaultsHelpFormatter

    race = commands.add_parser("race", help="the time of a step, by method", formatter_class=form)
    _add_network(race)
    _add_workload(race)
    race.add_argument("--methods", default=RACE_METHODS, help="what to compare, commas between")
    race.add_argument("--rounds", type=_count, default=10, help="turns of each method")
    race.add_argument("--turn", type=_count, default=2, help="steps of a turn")
    race.add_argument(
        "--compute", type=as_seconds, help="wait so long instead of computing, e.g. 50ms"
    )
    _add_output(race)
    race.set_defaults(run=_race)

    train = commands.add_parser(
        "train", help="the loss by time and bytes, by method", formatter_class=form
    )
    _add_network(train)
    _add_workload(train)
    train.add_argument("--methods", default=TRAIN_METHODS, help="what to compare, commas between")
    train.add_argument("--steps", type=_count, default=300, help="of dense; it sets the loss")
    train.add_argument("--target-loss", type=float, help="the loss to reach instead of dense's")
    train.add_argument("--seconds", type=as_seconds, help="train each for so long instead")
    train.add_argument("--seeds", type=_count, default=1, help="trainings of each method")
    train.add_argument(
        "--patience", type=float, default=3.0, help="times the steps of dense before giving up"
    )
    train.add_argument("--evaluate-every", type=_count, default=20, help="steps")
    train.add_argument(
        "--clock",
        choices=["race", "real"],
        default="real",
        help="real: train on the slow network; race: train without the limit, and take the time "
        "of each step from a race",
    )
    train.add_argument("--rounds", type=_count, default=5, help="of the race before the training")
    train.add_argument("--optimizer", choices=["adamw", "sgd"], help="instead of the model's")
    train.add_argument("--learning-rate", type=float, help="instead of the model's")
    train.add_argument("--schedule", choices=["constant", "cosine"], default="constant")
    _add_output(train)
    train.set_defaults(run=_train, compute=None)

    shown = commands.add_parser("report", help="one page from one or several results.json")
    shown.add_argument("files", nargs="+", type=Path, metavar="results.json")
    shown.add_argument("--out", type=Path, default=Path("report.html"), help="the page to write")
    shown.add_argument("--json", action="store_true", help="for machines: all numbers")
    shown.set_defaults(run=_report)
    return parser


def _add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=_count, default=4, help="machines, with a rank on each")
    parser.add_argument(
        "--rate", default="100mbit", help="of every link, both ways; or one for each host; or none"
    )
    parser.add_argument("--delay", type=as_seconds, default=0.0, help="between any two hosts")
    parser.add_argument(
        "--local", action="store_true", help="processes without a network of their own: no limit"
    )


def _add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="gpt:1m", help="what to train")
    parser.add_argument("--batch", type=_count, default=4, help="examples per rank and step")
    parser.add_argument("--context", type=_count, default=64, help="characters per example")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="folder for results.json and report.html")
    parser.add_argument("--json", action="store_true", help="for machines: all numbers")


def _workload(asked: argparse.Namespace) -> Workload:
    return Workload(
        model=asked.model,
        batch=asked.batch,
        context=asked.context,
        compute=asked.compute,
        seed=asked.seed,
    )


def _network(asked: argparse.Namespace) -> runs.Network:
    rates = parse_rates("none" if asked.local else asked.rate, asked.hosts)
    kind = "local" if asked.local else "cluster"
    return runs.Network(rates=rates, delay=asked.delay, kind=kind)


def _become_root(asked: argparse.Namespace) -> None:
    if not asked.local:
        become_root("topreduce", ["lab", *asked.argv])


def _command(asked: argparse.Namespace) -> str:
    return shlex.join(["topreduce", "lab", *asked.argv])


def _count(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def as_seconds(word: str) -> float:
    """A time with its unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s|min)", word)
    if match is None:
        raise argparse.ArgumentTypeError(f"write it as 500us, 50ms, 2s or 1min, not {word!r}")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}[match[2]]
