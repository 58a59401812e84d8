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
from topreduce.lab.train import PLAIN_DDP, TrainOptions, TrainResult, ring_bytes, train_rank

SAMPLE_CHARACTERS = 240
SAMPLE_LINES = 3
DENSE_METHODS = ("dense", PLAIN_DDP)


def main(argv: Sequence[str] | None = None) -> int:
    """Train with each method, then compare loss, bytes and text."""
    asked = _parse(argv)
    console = Console()
    results: list[TrainResult] = []
    try:
        for method in asked.methods:
            results.append(_train(console, asked, method))
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
    return parser.parse_args(argv)


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


def _train(console: Console, asked: argparse.Namespace, method: str) -> TrainResult:
    # A dense start and a falling density cost little and save most of the loss of sparsity.
    sparse = {
        "density": asked.density,
        "warmup_steps": asked.steps // 20,
        "ramp_steps": asked.steps // 10,
    }
    options = TrainOptions(
        method=method,
        attach={} if method in DENSE_METHODS else sparse,
        model=asked.model,
        batch=asked.batch,
        steps=asked.steps,
        sample=SAMPLE_CHARACTERS,
        seed=asked.seed,
    )
    with progress(console, _label(asked, method), asked.steps) as advance:
        results = launch(
            train_rank,
            asked.ranks,
            options,
            lambda report: advance(report.step, f"loss {report.loss:.2f}"),
        )
    return results[0]


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
            f"{numbers['bytes_sent'] / 1e6:.1f}",
            f"{numbers['bytes_last_step'] / 1e3:.1f}",
            f"{numbers['saves']:.1f}x",
            f"{numbers['saves_last_step']:.1f}x",
            f"{numbers['seconds']:.0f}",
            f"{1e3 * numbers['seconds'] / asked.steps:.0f}",
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
        console.print(f"\nwritten by the model trained with {_label(asked, result.method)}:")
        written = [line for line in result.sample.splitlines() if line.strip()]
        console.print(Line("\n".join(f"  {line}" for line in written[:SAMPLE_LINES])))
    console.print(
        "\nOn one machine the network is free: the bytes show the gain, the seconds do not.",
        highlight=False,
        soft_wrap=True,
    )


def _summary(asked: argparse.Namespace, result: TrainResult) -> dict[str, float]:
    dense_step = ring_bytes(result.parameters, asked.ranks)
    total, last = sum(result.bytes_sent), result.bytes_sent[-1]
    return {
        "bytes_sent": total,
        "bytes_last_step": last,
        # One rank alone sends nothing in either way.
        "saves": dense_step * asked.steps / total if total else 1.0,
        "saves_last_step": dense_step / last if last else 1.0,
        "seconds": sum(result.step_seconds),
    }


def _as_json(asked: argparse.Namespace, results: Sequence[TrainResult]) -> dict[str, Any]:
    return {
        "asked": {name: value for name, value in vars(asked).items() if name != "json"},
        "runs": [{**dataclasses.asdict(each), **_summary(asked, each)} for each in results],
    }


if __name__ == "__main__":
    sys.exit(main())
