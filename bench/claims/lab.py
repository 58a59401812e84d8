"""lab: is the simulated network right? Races on the lab's emulated one, beside simulated ones.

The lab runs real processes, TCP and limited links; the simulation runs the same code, and counts
time, with the rates, bursts and waits of the lab and the seconds that its own threads compute. In
the lab all hosts share the cores of this machine, for Python and the kernel's TCP too, of which the
simulation knows nothing. So each race runs twice, with a limit and without one, and two times are
shown beside the lab's:

    simulated       = noop + what is simulated beyond the wait
    with processors = noop + what the method takes beyond noop in the lab without a limit
                           + (simulated with the limit - simulated without one)

The first leaves those processors out; the second adds them up with the network, though they
overlap. Hosts wait 50 ms instead of computing. Nothing else may run meanwhile.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from claim import Claim, Run
from figure import Figure
from network import means, simulate

from topreduce.lab.network.cluster import bucket_bytes, rate_words
from topreduce.lab.tasks.models import Workload, make_task
from topreduce.units import parse_rate

COMPUTE, LATENCY = 0.05, 60e-6
METHODS = (
    "topreduce.dense",
    "topk:density=0.05,values=fp32",
    "topk:density=0.05,values=fp32,granularity=model",
    "ok_topk:density=0.05,values=fp32",
    "arc_topk:density=0.2,values=fp32",
)


@dataclass(frozen=True)
class Race:
    hosts: int
    model: str
    rate: str

    def __str__(self) -> str:
        return f"{self.hosts} hosts, {rate_words(parse_rate(self.rate))}, {self.model}"

    @property
    def unlimited(self) -> Race:
        return replace(self, rate="none")


RACES = (
    Race(4, "gpt:1m", "100mbit"),
    Race(8, "gpt:1m", "100mbit"),
    Race(4, "gpt:1m", "1gbit"),
    Race(8, "gpt:1m", "1gbit"),
)


def real(race: Race, rounds: int) -> dict[str, Any]:
    """The median step of each method, and the bytes at a host's interface."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "topreduce", "lab", "race", "--model", race.model]
        command += ["--hosts", str(race.hosts), "--rate", race.rate]
        command += ["--compute", f"{COMPUTE * 1e3:g}ms", "--rounds", str(rounds)]
        command += ["--methods", ",".join(["noop", *METHODS]), "--out", f"{folder}/race"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        results = json.loads(Path(f"{folder}/race/results.json").read_text())
    return {
        row["label"]: {
            "seconds": statistics.median(row["seconds"]),
            "bytes": statistics.fmean(row["bytes_sent"]),
        }
        for row in results["race"]
    }


def simulated(label: str, race: Race) -> dict[str, Any]:
    shapes = [each.shape for each in make_task(Workload(model=race.model)).model.parameters()]
    rate = parse_rate(race.rate) or math.inf
    steps = simulate(
        spec=label.removeprefix("topreduce."),
        ranks=race.hosts,
        rate=rate,
        latency=LATENCY,
        burst=0 if rate == math.inf else bucket_bytes(rate),
        shapes=",".join("x".join(map(str, shape)) for shape in shapes),
        common=0,
        compute=COMPUTE,
        processing=max(1.0, race.hosts / (os.cpu_count() or 1)),
        steps=16,
        skip=6,
    )
    return means(steps)


def main() -> None:
    claim = Claim("lab", __doc__ or "")
    races = RACES[:1] if claim.quick else RACES
    both = list(dict.fromkeys(each for race in races for each in (race, race.unlimited)))
    labs = {
        race: Run(f"lab, {race}", lambda race=race: real(race, 1 if claim.quick else 4))
        for race in both
    }
    counted = {
        (race, label): Run(
            f"simulated, {race}, {label}", lambda race=race, label=label: simulated(label, race)
        )
        for race in both
        for label in METHODS
    }
    found = claim.measure([*labs.values(), *counted.values()])
    rows, lines = [], []
    for race in races:
        pair = (race, race.unlimited)
        needed = [labs[each] for each in pair]
        needed += [counted[each, label] for each in pair for label in METHODS]
        if any(run.name not in found for run in needed):
            continue
        limited, free = (found[labs[each].name] for each in pair)
        noop, again = (row["seconds"] for label, row in limited.items() if label[:4] == "noop")
        rows.append([str(race), "noop twice", ms(noop), ms(again), off(again, noop), "", "", ""])
        points = []
        for label in METHODS:
            with_limit, without = (found[counted[each, label].name] for each in pair)
            there = limited[label]["seconds"]
            here = noop + with_limit["seconds"] - COMPUTE
            busy = noop + free[label]["seconds"] - free["noop"]["seconds"]
            busy += with_limit["seconds"] - without["seconds"]
            points.append((there, here))
            sent = f"{limited[label]['bytes'] / 1e6:.2f}, {with_limit['bytes'] / 1e6:.2f}"
            rows.append([str(race), f"`{label}`", ms(there), ms(here), off(here, there), ms(busy),
                         off(busy, there), sent])  # fmt: skip
        lines.append((str(race), sorted(points)))
    heads = ["", "method", "lab", "simulated", "off by", "with processors", "off by"]
    heads.append("MB, lab and simulated")
    claim.table(heads, rows)
    ends = [each for _, points in lines for point in points for each in point] or [1.0]
    same = ("straight: the same", [(end, end) for end in (min(ends), max(ends))])
    title = "A step of the lab, and the same simulated"
    claim.picture(Figure(title, "seconds, lab", "seconds, simulated", [*lines, same], "log", "log"))


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def off(here: float, there: float) -> str:
    return f"{here / there - 1:+.0%}"


if __name__ == "__main__":
    main()
