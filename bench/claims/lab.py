"""lab: is the simulated network right? Races on the lab's emulated one, beside simulated ones.

The lab runs real processes, TCP and limited links; the simulation runs the same code, and counts
time, with the rates, bursts and waits of the lab and the seconds that its own threads compute. In
the lab all hosts share the cores of this machine, so each of those seconds counts hosts / cores.
Shown is the time of a step beyond `noop`, for hosts that wait 50 ms instead of computing, and by
how much whole steps differ. Nothing else may run meanwhile.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from claim import Claim, Run
from network import means, simulate

from topreduce.lab.network.cluster import bucket_bytes
from topreduce.lab.tasks.models import Workload, make_task

MODEL, COMPUTE, LATENCY = "gpt:1m", 0.05, 60e-6
METHODS = (
    "topreduce.dense",
    "topk:density=0.05,values=fp32",
    "topk:density=0.05,values=fp32,granularity=model",
    "ok_topk:density=0.05,values=fp32",
    "arc_topk:density=0.2,values=fp32",
)
RACES = (
    (4, "100mbit", 100e6),
    (8, "100mbit", 100e6),
    (4, "1gbit", 1e9),
    (8, "1gbit", 1e9),
)


def race(hosts: int, rate: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "topreduce", "lab", "race", "--model", MODEL]
        command += ["--hosts", str(hosts), "--rate", rate, "--compute", f"{COMPUTE * 1e3:g}ms"]
        command += ["--rounds", str(rounds), "--methods", ",".join(["noop", *METHODS])]
        subprocess.run([*command, "--out", f"{folder}/race"], check=True, stdout=sys.stderr)
        results = json.loads(Path(f"{folder}/race/results.json").read_text())
    return {row["label"]: statistics.median(row["seconds"]) for row in results["race"]}


def simulated(label: str, hosts: int, rate: float) -> dict[str, Any]:
    shapes = [each.shape for each in make_task(Workload(model=MODEL)).model.parameters()]
    steps = simulate(
        spec=label.removeprefix("topreduce."),
        ranks=hosts,
        rate=rate,
        latency=LATENCY,
        burst=bucket_bytes(rate),
        shapes=",".join("x".join(map(str, shape)) for shape in shapes),
        common=0,
        compute=COMPUTE,
        processing=max(1.0, hosts / (os.cpu_count() or 1)),
        steps=16,
        skip=6,
    )
    return {"seconds": means(steps)["seconds"] - COMPUTE}


def main() -> None:
    claim = Claim("lab", __doc__ or "")
    races = {
        (hosts, rate): Run(
            f"lab, {hosts} hosts, {words}",
            lambda hosts=hosts, words=words: race(hosts, words, 2 if claim.quick else 4),
        )
        for hosts, words, rate in RACES
    }
    counted = {
        (hosts, rate, label): Run(
            f"simulated, {hosts} hosts, {words}, {label}",
            lambda label=label, hosts=hosts, rate=rate: simulated(label, hosts, rate),
        )
        for hosts, words, rate in RACES
        for label in METHODS
    }
    found = claim.measure([*races.values(), *counted.values()])
    rows = []
    for hosts, words, rate in RACES:
        if races[hosts, rate].name not in found:
            continue
        medians = found[races[hosts, rate].name]
        again = next(value for label, value in medians.items() if label[:5] == "noop ")
        rows.append([f"{hosts} hosts, {words}, noop twice", f"{medians['noop'] * 1e3:.0f} ms",
                     f"{again * 1e3:.0f} ms", ""])  # fmt: skip
        for label in METHODS:
            real = medians[label] - medians["noop"]
            here = found[counted[hosts, rate, label].name]["seconds"]
            # Whole steps: what hides under the computing is part of neither.
            whole = (here + medians["noop"]) / medians[label] - 1
            rows.append([f"{hosts} hosts, {words}, {label}", f"{real * 1e3:.0f} ms",
                         f"{here * 1e3:.0f} ms", f"{whole:+.0%}"])  # fmt: skip
    claim.table(["", "lab, beyond noop", "simulated", "whole step, off by"], rows)


if __name__ == "__main__":
    main()
