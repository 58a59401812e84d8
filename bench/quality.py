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
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import topreduce
from topreduce.lab.experiments.launch import launch
from topreduce.lab.experiments.methods import OURS, Method
from topreduce.lab.experiments.replica import Replica
from topreduce.lab.tasks.models import Workload

PILOT_STEPS = 48
PILOTS = 2
REFERENCE = "topk"


@dataclass(frozen=True)
class Variant:
    """A method with settings that differ from its own."""

    method: str
    settings: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return ", ".join([self.method, *(f"{name}={value}" for name, value in self.settings)])

    def spec(self, density: float, steps: int) -> str:
        settings = dict(self.settings)
        if self.method != "dense":
            start = {"warmup_steps": steps // 20, "ramp_steps": steps // 10}
            settings = {"density": f"{density:.6g}", **start, **settings}
        words = ",".join(f"{name}={value}" for name, value in settings.items())
        return f"{OURS}{self.method}:{words}" if words else f"{OURS}{self.method}"


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


@dataclass(frozen=True)
class Run:
    name: str
    spec: str
    steps: int
    workload: Workload


@dataclass(frozen=True)
class Result:
    loss: float  # on the data kept back
    bytes: float  # per step and rank, over the second half of the steps
    dense_bytes: float  # what a ring would send


def train_each(
    rank: int, world_size: int, runs: list[Run], report: Callable[[str], None]
) -> list[Result]:
    """All runs one after the other in the same processes."""
    torch.set_num_threads(1)
    results = []
    for done, run in enumerate(runs, 1):
        started = time.perf_counter()
        replica = Replica(rank, run.workload, Method(run.name, run.spec))
        sent = []
        for step in range(run.steps):
            rate = 0.55 + 0.45 * math.cos(math.pi * step / run.steps)
            sent.append(replica.step(rate).stats["bytes_sent"])
        loss = replica.validation_loss()
        replica.close()
        entries = sum(parameter.numel() for parameter in replica.task.model.parameters())
        ring = 2 * (world_size - 1) / world_size * 4 * entries
        results.append(Result(loss, statistics.mean(sent[run.steps // 2 :]), ring))
        if rank == 0:
            seconds = time.perf_counter() - started
            report(f"# {done}/{len(runs)} {run.name}: {seconds:.0f} s")
    return results


def train(
    asked: argparse.Namespace, densities: dict[Variant, float], steps: int, seeds: int
) -> dict[Variant, list[Result]]:
    """The results by variant, one for each seed."""
    runs = [
        Run(
            each.name,
            each.spec(density, steps),
            steps,
            Workload(model=asked.model, batch=asked.batch, seed=seed),
        )
        for each, density in densities.items()
        for seed in range(seeds)
    ]
    results = iter(launch(train_each, asked.ranks, runs, print)[0])
    return {each: [next(results) for _ in range(seeds)] for each in densities}


def measure(
    asked: argparse.Namespace, densities: dict[Variant, float], title: str
) -> list[dict[str, Any]]:
    print(f"\n{title}: {asked.ranks} ranks, {asked.steps} steps, {asked.model}")
    rows = []
    for each, results in train(asked, densities, asked.steps, asked.seeds).items():
        sent = statistics.mean(result.bytes for result in results)
        rows.append(
            {
                "name": each.name,
                "density": 1.0 if each.method == "dense" else densities[each],
                "loss": statistics.mean(result.loss for result in results),
                "bytes": sent,
                "of_dense": sent / results[0].dense_bytes,
            }
        )
    print(f"{'':40} {'density':>8} {'loss':>7} {'kB/step':>9} {'of dense':>8}")
    for row in rows:
        print(
            f"{row['name']:40} {row['density']:8.4f} {row['loss']:7.3f} "
            f"{row['bytes'] / 1e3:9.1f} {row['of_dense']:8.4f}",
            flush=True,
        )
    return rows


def equal_bytes(
    asked: argparse.Namespace, chosen: list[Variant], target: float
) -> dict[Variant, float]:
    """The densities at which a few steps send about `target` bytes."""
    densities = dict.fromkeys(chosen, asked.density)
    for _ in range(PILOTS):
        for each, (result,) in train(asked, densities, PILOT_STEPS, 1).items():
            ratio = target / max(1.0, result.bytes)
            densities[each] = min(1.0, max(asked.density / 50, densities[each] * ratio))
    return densities


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
    tables = {"density": measure(asked, dict.fromkeys(chosen, asked.density), "equal density")}
    by_name = {row["name"]: row for row in tables["density"]}
    if REFERENCE in by_name:
        others = [each for each in chosen if each.name not in ("dense", REFERENCE)]
        densities = equal_bytes(asked, others, by_name[REFERENCE]["bytes"])
        tables["bytes"] = measure(asked, densities, "near-equal bytes")
    if asked.json:
        asked.json.write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
