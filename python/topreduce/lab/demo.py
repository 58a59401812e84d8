"""The demo: a small GPT on four hosts with slow links, dense and with us, for the same time."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text as Line

from topreduce.lab.arguments import Defaults, as_seconds
from topreduce.lab.command import guarded, make_console, publish
from topreduce.lab.experiments import runs
from topreduce.lab.experiments.methods import parse_methods
from topreduce.lab.experiments.train import TrainOptions
from topreduce.lab.network.cluster import become_root, obstacle, parse_rates
from topreduce.lab.report.results import Results, new_folder
from topreduce.lab.tasks.models import MODELS, Workload

METHODS = "dense,bf16,auto"
SAMPLE_CHARACTERS = 240
SAMPLE_LINES = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Race, train, compare; the exit code is that of `topreduce lab`."""
    words = list(sys.argv[1:] if argv is None else argv)
    asked = _parse(words)
    if not asked.local:
        become_root("topreduce.lab.demo", words)
    return guarded(lambda: _run(asked, words, make_console(sys.stdout)), "demo")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./run demo",
        description="Trains a small GPT on an emulated slow network, and compares methods.",
        formatter_class=Defaults,
    )
    parser.add_argument(
        "--hosts", type=int, default=4, help="number of emulated hosts, with one rank each"
    )
    parser.add_argument("--rate", default="100mbit", help="rate of every link, or none")
    parser.add_argument(
        "--local",
        action="store_true",
        help="plain processes of this machine, without an emulated network",
    )
    parser.add_argument(
        "--methods", default=METHODS, help="methods to compare, separated by commas"
    )
    parser.add_argument("--model", choices=MODELS, default="gpt:1m", help="model to train")
    parser.add_argument(
        "--seconds", type=as_seconds, default="60s", help="training time of each method"
    )
    parser.add_argument("--out", type=Path, help="folder for results.json and report.html")
    return parser.parse_args(words)


def _run(asked: argparse.Namespace, words: Sequence[str], console: Console) -> None:
    reason = None if asked.local else obstacle()
    if reason is not None:
        console.print(
            f"No emulated network on this machine: {reason}\nIt needs root, or user namespaces "
            "(unshare -Urn true), and iproute2. The ranks are plain processes here, and their "
            "network costs nothing: look at the bytes, not at the seconds.",
            highlight=False,
        )
    kind = "local" if asked.local or reason is not None else "cluster"
    rates = parse_rates("none" if kind == "local" else asked.rate, asked.hosts)
    network = runs.Network(rates=rates, kind=kind)
    options = TrainOptions(
        workload=Workload(model=asked.model),
        methods=parse_methods(asked.methods),
        seconds=asked.seconds,
        schedule="cosine",
        evaluate_every=10,
        sample=SAMPLE_CHARACTERS,
    )
    console.print(
        f"{asked.model} on {network.words()}: a short race, then {asked.seconds:.0f} s of training "
        "with each method",
        highlight=False,
    )
    folder = new_folder(asked.out, "demo")
    command = shlex.join(["./run", "demo", *words])
    results = runs.train(console, network, options, "real", 3, command, folder)
    _show_samples(console, results)
    publish(console, results, folder)


def _show_samples(console: Console, results: Results) -> None:
    for run in results.runs:
        console.print(f"\nwritten by the model trained with {run.label}:", highlight=False)
        written = [line for line in run.sample.splitlines() if line.strip()]
        lines = Line("\n".join(f"  {line}" for line in written[:SAMPLE_LINES]))
        console.print(lines, soft_wrap=True)
    console.print()


if __name__ == "__main__":
    sys.exit(main())
