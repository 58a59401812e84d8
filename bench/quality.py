"""quality: what every method makes of the demo's GPT, and what it sends for that.

Trains with every method of the catalog, and some variants: first all at the same density, then each
at the density at which it sends about as many bytes as topk does. Prints validation loss and bytes
per step and rank, averaged over the second half of the steps (the first has warm-up and ramp). One
seed unless --seeds says more; differences below a few hundredths are noise.

dgc carries momentum and is meant for SGD; here it stands in front of AdamW like all others, so the
row with feedback=residual is the one that compares its choice.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import topreduce
from topreduce.lab.launch import launch
from topreduce.lab.train import Progress, TrainOptions, TrainResult, ring_bytes, train_each

PILOT_STEPS = 16
PILOTS = 3
REFERENCE = "topk"


@dataclass(frozen=True)
class Variant:
    """A method with settings that differ from its own."""

    method: str
    settings: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return ", ".join([self.method, *(f"{name}={value}" for name, value in self.settings)])


def variant(method: str, **settings: Any) -> Variant:
    return Variant(method, tuple(settings.items()))


EXTRA = [
    variant("topk", granularity="model"),
    variant("arc_topk", granularity="model", ranked="model"),
    *(variant("ok_topk", global_ratio=ratio) for ratio in (0.5, 2, 4)),
    variant("gaussiank", finish="exact"),
    variant("redsync", finish="exact"),
    variant("dgc", feedback="residual"),
]


def variants(only: list[str]) -> Iterator[Variant]:
    for method in topreduce.methods():
        name = method["name"]
        if not only or name in only:
            yield variant(name)
            yield from (extra for extra in EXTRA if extra.method == name)


def options(
    asked: argparse.Namespace, chosen: Variant, density: float, **more: Any
) -> TrainOptions:
    steps = more.get("steps", asked.steps)
    sparse = {
        "density": density,
        "warmup_steps": steps // 20,
        "ramp_steps": steps // 10,
        **dict(chosen.settings),
    }
    return TrainOptions(
        method=chosen.method,
        attach={} if chosen.method == "dense" else sparse,
        **{"steps": asked.steps, "batch": asked.batch, "model": asked.model, **more},
    )


def train(asked: argparse.Namespace, runs: list[TrainOptions], label: str) -> list[TrainResult]:
    """All runs in the same processes; a line for each as it ends."""
    done, started = 0, time.perf_counter()

    def show(report: Progress) -> None:
        nonlocal done, started
        if report.step == runs[done].steps:
            done += 1
            seconds = time.perf_counter() - started
            print(f"# {label} {done}/{len(runs)} {report.method} {seconds:.0f} s", flush=True)
            started = time.perf_counter()

    return launch(train_each, asked.ranks, runs, show)[0]


def bytes_per_step(result: TrainResult) -> float:
    return statistics.mean(result.bytes_sent[len(result.bytes_sent) // 2 :])


def show(asked: argparse.Namespace, rows: list[dict[str, Any]], title: str) -> None:
    dense = ring_bytes(rows[0]["parameters"], asked.ranks)
    print(f"\n{title}: {asked.ranks} ranks, {asked.steps} steps, {asked.model}")
    print(f"{'':40} {'density':>8} {'loss':>7} {'kB/step':>9} {'of dense':>8}")
    for row in rows:
        print(
            f"{row['name']:40} {row['density']:8.4f} {row['loss']:7.3f} "
            f"{row['bytes'] / 1e3:9.1f} {row['bytes'] / dense:8.4f}",
            flush=True,
        )


def measure(
    asked: argparse.Namespace, densities: dict[Variant, float], title: str
) -> list[dict[str, Any]]:
    runs = [
        options(asked, each, density, seed=seed)
        for each, density in densities.items()
        for seed in range(asked.seeds)
    ]
    results = train(asked, runs, title)
    rows = []
    for i, (each, density) in enumerate(densities.items()):
        mine = results[i * asked.seeds : (i + 1) * asked.seeds]
        rows.append(
            {
                "name": each.name,
                "density": 1.0 if each.method == "dense" else density,
                "loss": statistics.mean(result.validation_loss for result in mine),
                "bytes": statistics.mean(map(bytes_per_step, mine)),
                "parameters": mine[0].parameters,
            }
        )
    show(asked, rows, title)
    return rows


def equal_bytes(
    asked: argparse.Namespace, chosen: list[Variant], target: float
) -> dict[Variant, float]:
    """The densities at which a few steps send about `target` bytes."""
    densities = dict.fromkeys(chosen, asked.density)
    for _ in range(PILOTS):
        pilots = [options(asked, each, densities[each], steps=PILOT_STEPS) for each in chosen]
        for each, result in zip(chosen, train(asked, pilots, "pilot"), strict=True):
            ratio = target / max(1.0, bytes_per_step(result))
            densities[each] = min(1.0, max(asked.density / 50, densities[each] * ratio))
    return densities


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=[], help="only these")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--model", default="gpt:0.6m")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    asked = parser.parse_args()
    chosen = list(variants(asked.methods))
    tables = {"equal density": measure(asked, dict.fromkeys(chosen, asked.density), "density")}
    by_name = {row["name"]: row for row in tables["equal density"]}
    if REFERENCE in by_name:
        others = [each for each in chosen if each.name not in ("dense", REFERENCE)]
        densities = equal_bytes(asked, others, by_name[REFERENCE]["bytes"])
        tables["equal bytes"] = measure(asked, densities, "bytes")
    if asked.json:
        asked.json.write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
