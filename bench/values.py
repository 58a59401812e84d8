"""values: what a training loses by coarser values at the same number of bytes.

The demo's GPT in 4 processes, topk with the demo's warm-up and ramp. The density of each row makes
entries times bits about the same as 1 % in bf16; one seed unless told.
"""

from __future__ import annotations

import argparse

from topreduce.lab.launch import launch
from topreduce.lab.train import Progress, TrainOptions, TrainResult, train_each

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


def options_of(values: str, density: float, steps: int, seed: int) -> TrainOptions:
    if values == "dense":
        return TrainOptions(method="dense", steps=steps, seed=seed)
    attach = {
        "values": values,
        "density": density,
        "warmup_steps": steps // 20,
        "ramp_steps": steps // 10,
    }
    return TrainOptions(method="topk", attach=attach, steps=steps, seed=seed)


def ignore(_: Progress) -> None:
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
            run = options_of(values, DENSITIES[values], asked.steps, seed)
            show(values, DENSITIES[values], seed, launch(train_each, 4, [run], ignore)[0][0])
    return 0


def show(values: str, density: float, seed: int, result: TrainResult) -> None:
    after_ramp = result.bytes_sent[len(result.bytes_sent) // 5 :]
    kilobytes = sum(after_ramp) / len(after_ramp) / 1e3
    line = f"{values:8}{100 * density:>8.2f}%{seed:>6}{result.validation_loss:>8.3f}"
    print(f"{line}{kilobytes:>9.1f}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
