"""The demo: a small GPT trained on this machine, once densely and once with Top-K."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text as Line

from topreduce.lab.gpt import PRESETS
from topreduce.lab.launch import RankError, launch
from topreduce.lab.progress import progress
from topreduce.lab.train import (
    PLAIN_DDP,
    Progress,
    TrainOptions,
    TrainResult,
    ring_bytes,
    train_each,
)

SAMPLE_CHARACTERS = 240
SAMPLE_LINES = 3
DENSE_METHODS = ("dense", PLAIN_DDP)


def main(argv: Sequence[str] | None = None) -> int:
    """Train with each method, then compare loss, bytes and text."""
    asked = _parse(argv)
    console = Console()
    console.print(
        f"{asked.ranks} processes train {asked.model}, {asked.steps} steps with each method",
        highlight=False,
    )
    try:
        results = _train(console, asked)
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; no process is left behind", file=sys.stderr)
        return 130
    if asked.json:
        asked.json.write_text(json.dumps(_as_json(asked, results), indent=1) + "\n")
    _show(console, asked, results)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    defaults = TrainOptions()
    parser = argparse.ArgumentParser(
        prog="python -m topreduce.lab.demo",
        description="Trains a small GPT in several processes of this machine and compares methods.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["dense", "topk"],
        metavar="METHOD",
        help=f'methods of topreduce, or "{PLAIN_DDP}" for plain DDP without it',
    )
    parser.add_argument("--steps", type=_count, default=defaults.steps, help="steps per method")
    parser.add_argument("--ranks", type=_count, default=4, help="processes")
    parser.add_argument("--density", type=_share, default=0.01, help="share of entries sent")
    parser.add_argument("--model", choices=list(PRESETS), default=defaults.model, help="model")
    parser.add_argument(
        "--batch", type=_count, default=defaults.batch, help="sequences per rank and step"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and samples")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers here")
    asked = parser.parse_args(argv)
    if asked.json and not asked.json.parent.is_dir():
        parser.error(f"--json: there is no folder {asked.json.parent}")
    return asked


def _count(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _share(word: str) -> float:
    number = float(word)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, not {number}")
    return number


def _train(console: Console, asked: argparse.Namespace) -> list[TrainResult]:
    labels = {method: _label(asked, method) for method in asked.methods}
    with progress(console, list(labels.values()), asked.steps) as advance:

        def show(report: Progress) -> None:
            advance(labels[report.method], report.step, f"loss {report.loss:.2f}")

        runs = [_options(asked, method) for method in labels]
        return launch(train_each, asked.ranks, runs, show)[0]


def _options(asked: argparse.Namespace, method: str) -> TrainOptions:
    # Sparse from the first step trains worse: start densely, then let the density fall.
    sparse = {
        "density": asked.density,
        "warmup_steps": asked.steps // 20,
        "ramp_steps": asked.steps // 10,
    }
    return TrainOptions(
        method=method,
        attach={} if method in DENSE_METHODS else sparse,
        model=asked.model,
        batch=asked.batch,
        steps=asked.steps,
        sample=SAMPLE_CHARACTERS,
        seed=asked.seed,
    )


def _label(asked: argparse.Namespace, method: str) -> str:
    return method if method in DENSE_METHODS else f"{method} {100 * asked.density:g}%"


def _show(console: Console, asked: argparse.Namespace, results: Sequence[TrainResult]) -> None:
    table = Table(
        title=f"{results[0].parameters:,} parameters, {asked.ranks} ranks, {asked.steps} steps"
    )
    table.add_column("method")
    for heading in ("loss", "MB sent", "kB/step", "saves", "saves/step", "seconds", "ms/step"):
        table.add_column(heading, justify="right")
    for result in results:
        numbers = _summary(asked, result)
        table.add_row(
            _label(asked, result.method) + ("" if result.bytes_are == "counted" else " *"),
            f"{result.validation_loss:.3f}",
            f"{numbers['total_bytes'] / 1e6:.1f}",
            f"{numbers['last_step_bytes'] / 1e3:.1f}",
            f"{numbers['total_saves']:.1f}x",
            f"{numbers['last_step_saves']:.1f}x",
            f"{numbers['total_seconds']:.0f}",
            f"{1e3 * numbers['total_seconds'] / asked.steps:.0f}",
        )
    console.print(table)
    notes = [
        "loss: on text kept back. MB sent: by one rank; kB/step: in the last step.",
        "saves: times less than a dense ring sends, in all and in the last step.",
    ]
    if any(result.bytes_are != "counted" for result in results):
        notes.append("* bytes computed for a ring, not counted.")
    console.print("\n".join(notes), style="dim", highlight=False)

    for result in results:
        heading = f"\nwritten by the model trained with {_label(asked, result.method)}:"
        console.print(heading, highlight=False)
        written = [line for line in result.sample.splitlines() if line.strip()]
        lines = Line("\n".join(f"  {line}" for line in written[:SAMPLE_LINES]))
        console.print(lines, soft_wrap=True)
    console.print(
        "\nOn one machine the network is free: the bytes show the gain, the seconds do not.",
        highlight=False,
        soft_wrap=True,
    )


def _summary(asked: argparse.Namespace, result: TrainResult) -> dict[str, float]:
    dense_step = ring_bytes(result.parameters, asked.ranks)
    total, last = sum(result.bytes_sent), result.bytes_sent[-1]
    return {
        "total_bytes": total,
        "last_step_bytes": last,
        # One rank alone sends nothing in either way.
        "total_saves": dense_step * asked.steps / total if total else 1.0,
        "last_step_saves": dense_step / last if last else 1.0,
        "total_seconds": sum(result.step_seconds),
    }


def _as_json(asked: argparse.Namespace, results: Sequence[TrainResult]) -> dict[str, Any]:
    return {
        "asked": {name: value for name, value in vars(asked).items() if name != "json"},
        "runs": [{**dataclasses.asdict(each), **_summary(asked, each)} for each in results],
    }


if __name__ == "__main__":
    sys.exit(main())
