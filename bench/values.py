"""values: what a training loses by coarser values at the same number of bytes.

A small GPT in 4 processes, topk with a warm-up of 5 % and a ramp of 10 % of the steps. The density
of each row makes entries times bits about the same as 1 % in bf16; one seed unless told.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from topreduce.lab.experiments.launch import launch
from topreduce.lab.experiments.methods import Method
from topreduce.lab.experiments.replica import Replica
from topreduce.lab.tasks.models import Workload

DENSITIES = {
    "dense": 1.0,
    "fp32": 0.006,
    "bf16": 0.01,
    "fp16": 0.01,
    "int8": 0.0155,
    "int4": 0.0215,
    "int2": 0.027,
    "sign": 0.032,
}


@dataclass(frozen=True)
class Options:
    spec: str
    steps: int
    seed: int


def spec_of(values: str, steps: int) -> str:
    if values == "dense":
        return "topreduce.dense"
    density = DENSITIES[values]
    schedule = f"warmup_steps={steps // 20},ramp_steps={steps // 10}"
    return f"topk:density={density},values={values},{schedule}"


def train(
    rank: int, world_size: int, options: Options, report: Callable[[str], None]
) -> tuple[float, float]:
    """The validation loss, and the bytes of a step after the ramp, by our own count."""
    torch.set_num_threads(1)
    workload = Workload(model="gpt:0.6m", seed=options.seed)
    replica = Replica(rank, workload, Method(options.spec, options.spec))
    sent = []
    for step in range(options.steps):
        rate = 0.55 + 0.45 * math.cos(math.pi * step / options.steps)
        sent.append(replica.step(rate).stats["bytes_sent"])
    loss = replica.validation_loss()
    replica.close()
    after_ramp = sent[options.steps // 5 :]
    return loss, sum(after_ramp) / len(after_ramp)


def ignore(_: str) -> None:
    pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--values", nargs="+", choices=DENSITIES, default=list(DENSITIES))
    asked = parser.parse_args()
    print(f"{'values':8}{'density':>9}{'seed':>6}{'loss':>8}{'kB/step':>9}  (after the ramp)")
    for seed in asked.seeds:
        for values in asked.values:
            options = Options(spec_of(values, asked.steps), asked.steps, seed)
            loss, sent = launch(train, 4, options, ignore)[0]
            line = f"{values:8}{100 * DENSITIES[values]:>8.2f}%{seed:>6}{loss:>8.3f}"
            print(f"{line}{sent / 1e3:>9.1f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
