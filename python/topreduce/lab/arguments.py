"""The options of `topreduce lab`, and what they stand for."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from topreduce.lab.experiments.methods import Method, parse_methods
from topreduce.lab.experiments.runs import Network
from topreduce.lab.network.cluster import Rate, parse_rates
from topreduce.lab.tasks.models import MODELS, Workload, check_device, check_model
from topreduce.units import parse_seconds

RACE_METHODS = "noop,dense,bf16,powersgd:1,powersgd:4,auto,topk:density=0.01"
TRAIN_METHODS = "dense,bf16,powersgd:8,auto,topk:density=0.01"
_LONGEST_DELAY = 1.0  # seconds; the self-test waits for several round trips


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except those that are empty or zero. Lists may break after a comma."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help

    def _split_lines(self, text: str, width: int) -> list[str]:
        return super()._split_lines(re.sub(r",(?=\S)", ", ", text), width)


def make_parser() -> argparse.ArgumentParser:
    """Of `topreduce lab`; what it reads has the name of the subcommand in `command`."""
    parser = argparse.ArgumentParser(
        prog="topreduce lab",
        description="An emulated cluster on this machine: does it help on your network?",
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    race = _add_command(
        commands,
        "race",
        "measure the time of a step with each method",
        "Measures what a training step costs with each method on an emulated slow network: its "
        "time and the bytes that a host sends. Prints a verdict and tables, and writes "
        "results.json and a page with charts.",
        "topreduce lab race --rate 50mbit --methods noop,dense,auto",
    )
    _add_network(race)
    _add_workload(race)
    race.add_argument(
        "--methods", default=RACE_METHODS, help="methods to compare, separated by commas"
    )
    race.add_argument("--rounds", type=count, default=10, help="number of turns of each method")
    race.add_argument("--turn", type=count, default=2, help="steps in each turn")
    race.add_argument(
        "--then",
        action="append",
        default=[],
        metavar="RATE",
        help="change the rate of all links later in the race; may be repeated, and each rate "
        "lasts equally long",
    )
    race.add_argument(
        "--compute", type=as_seconds, help="wait this long instead of computing, e.g. 50ms"
    )
    race.add_argument(
        "--device",
        default="cpu",
        help="device of models and gradients, e.g. cuda; shared by all ranks",
    )
    race.add_argument(
        "--backend",
        default="gloo",
        help="backend of the device's process group, e.g. nccl, which needs a device per rank",
    )
    _add_output(race)

    train = _add_command(
        commands,
        "train",
        "train with each method: loss against time and bytes",
        "Trains a model with each method on an emulated slow network, after a short race, and "
        "measures how long each takes to reach the loss that dense ends with. Prints a verdict and "
        "tables, and writes results.json and a page with charts.",
        "topreduce lab train --rate 50mbit --methods dense,auto --seeds 3",
    )
    _add_network(train)
    _add_workload(train)
    train.add_argument(
        "--methods", default=TRAIN_METHODS, help="methods to compare, separated by commas"
    )
    train.add_argument(
        "--steps",
        type=count,
        default=300,
        help="steps of dense; the others must reach the loss that it ends with",
    )
    train.add_argument(
        "--target-loss", type=float, help="loss to reach, instead of the last loss of dense"
    )
    train.add_argument(
        "--seconds", type=as_seconds, help="train every method for this long, instead of --steps"
    )
    train.add_argument(
        "--seeds", type=count, default=1, help="trainings of each method, each with another seed"
    )
    train.add_argument(
        "--patience",
        type=float,
        default=3.0,
        help="give up after this many times the steps of dense",
    )
    train.add_argument(
        "--evaluate-every",
        type=count,
        default=10,
        help="steps between evaluations; a loss counts as reached at an evaluation",
    )
    train.add_argument(
        "--clock",
        choices=["race", "real"],
        help="real (default): train on the slow network; race: train on an unlimited network, and "
        "take the time of each step from a race",
    )
    train.add_argument(
        "--rounds", type=count, default=5, help="rounds of the race before the training"
    )
    train.add_argument("--optimizer", choices=["adamw", "sgd"], help="replace that of the model")
    train.add_argument("--learning-rate", type=float, help="replace that of the model")
    train.add_argument(
        "--schedule",
        choices=["constant", "cosine"],
        default="constant",
        help="schedule of the learning rate",
    )
    train.add_argument(
        "--compute",
        type=as_seconds,
        help="time to compute a step on your hosts, e.g. 50ms: the race waits this long instead of "
        "computing; needs --clock race",
    )
    _add_output(train)
    train.set_defaults(then=[], device="cpu", backend="gloo")

    shown = _add_command(
        commands,
        "report",
        "make one page from one or several results.json",
        "Shows what races and trainings measured, several side by side: prints verdict and tables, "
        "and writes a page with charts.",
        "topreduce lab report a/results.json b/results.json --out both.html",
    )
    shown.add_argument(
        "files", nargs="+", type=Path, metavar="results.json", help="or the folder that it is in"
    )
    shown.add_argument("--out", type=Path, default=Path("report.html"), help="page to write")
    shown.add_argument("--json", action="store_true", help="print all numbers as JSON")
    shown.add_argument(
        "--markdown",
        action="store_true",
        help="print a Markdown table for each file, and write no page",
    )

    drawn = _add_command(
        commands,
        "plot",
        "draw loss against seconds as an SVG file",
        "Draws the loss of a training against seconds, with a line for each method, as an SVG "
        "file for a README or a paper.",
        "topreduce lab plot a/results.json --out loss.svg",
    )
    drawn.add_argument("file", type=Path, metavar="results.json", help="results of a training")
    drawn.add_argument("--out", type=Path, default=Path("loss.svg"), help="picture to write")
    drawn.set_defaults(json=False)
    return parser


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
    example: str,
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"example: {example}",
        formatter_class=Defaults,
    )


def _add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hosts", type=count, default=4, help="number of emulated hosts, with one rank each"
    )
    parser.add_argument(
        "--shards",
        type=count,
        default=1,
        help="ranks on each host, which hold one replica together (FSDP2); dense is then HSDP",
    )
    parser.add_argument(
        "--rate",
        default="100mbit",
        help="rate of every link, both ways; or a list with one for each host; or none",
    )
    parser.add_argument(
        "--delay",
        type=as_seconds,
        default=0.0,
        help="one-way delay between any two hosts: 15ms makes a round trip of 30 ms",
    )
    parser.add_argument(
        "--local",
        action="store_true",
        help="plain processes of this machine, without an emulated network",
    )


SHARDED_METHODS = "noop,dense,bf16,auto,topk:density=0.01"


def methods(asked: argparse.Namespace, usual: str) -> list[Method]:
    """What to compare; some of the usual are for models that are not sharded."""
    sharded = asked.shards > 1 and asked.methods == usual
    return parse_methods(SHARDED_METHODS if sharded else asked.methods, asked.shards)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="gpt:1m",
        help=f"{', '.join(MODELS)}, or your own: package.module:make (see docs/lab.md)",
    )
    parser.add_argument("--batch", type=count, default=4, help="examples per rank and step")
    parser.add_argument("--context", type=count, default=64, help="characters per example")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="folder for results.json and report.html")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")


def _check_device(asked: argparse.Namespace) -> None:
    if asked.device != "cpu" and asked.compute is not None:
        raise ValueError("--compute waits instead of computing: leave out --device")
    check_device(asked.device, asked.backend, asked.hosts * asked.shards)


def workload(asked: argparse.Namespace) -> Workload:
    """What was asked to compute."""
    check_model(asked.model)
    _check_device(asked)
    return Workload(
        model=asked.model,
        batch=asked.batch,
        context=asked.context,
        compute=asked.compute,
        seed=asked.seed,
        shards=asked.shards,
        device=asked.device,
        backend=asked.backend,
    )


def network(asked: argparse.Namespace) -> Network:
    """The network that was asked for."""
    if asked.local and asked.delay:
        raise ValueError("--delay needs a network of its own: leave --local out")
    if asked.delay > _LONGEST_DELAY:
        raise ValueError(f"--delay: at most {_LONGEST_DELAY:g} s, not {asked.delay:g} s")
    rates = parse_rates("none" if asked.local else asked.rate, asked.hosts)
    kind = "local" if asked.local else "cluster"
    later = [_limits(word, rates, asked.hosts) for word in asked.then]
    return Network(rates=rates, delay=asked.delay, kind=kind, shards=asked.shards, later=later)


def _limits(word: str, rates: list[Rate], hosts: int) -> list[float]:
    """Rates that links have later; what has no limit cannot get one."""
    later = [rate for rate in parse_rates(word, hosts) if rate is not None]
    if len(later) < hosts or None in rates:
        raise ValueError("--then changes rates: give --rate and --then limits, and not --local")
    return later


def count(word: str) -> int:
    """A number of things, of which there is at least one."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def as_seconds(word: str) -> float:
    """A time with its unit."""
    try:
        return parse_seconds(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
