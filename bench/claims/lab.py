"""lab: is the simulated network right? Races on the lab's emulated one, beside simulated ones.

The lab runs real processes, TCP and limited links; the simulation runs the same code, and counts
time, with the rates, bursts and waits of the lab. Two simulations are shown beside the lab:

    links alone      what is sent waits for links, and nothing else takes time
    with TCP, cores  links as quick as plain TCP makes them when all hosts send to all at once, and
                     the cores of this machine, which all hosts share: for what the library computes
                     and for what the system takes to move bytes

What TCP makes of the links and what it takes of the cores is measured with bare sockets on the same
links, without a line of the library (`tcp.py`). Hosts wait instead of computing: in the lab 50
ms, simulated for as long as `noop` takes there. Nothing else may run meanwhile.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claim import Claim, Run
from figure import Figure
from network import means, simulate
from tcp import plain_tcp

from topreduce.lab.network.cluster import bucket_bytes, rate_words
from topreduce.lab.tasks.models import Workload, make_task
from topreduce.units import parse_rate

COMPUTE = 0.05
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
        return f"{self.network}, {self.model}"

    @property
    def network(self) -> str:
        return f"{self.hosts} hosts, {rate_words(self.bits)}"

    @property
    def bits(self) -> float:
        rate = parse_rate(self.rate)
        assert rate is not None
        return rate


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


# ---- the same, simulated ------------------------------------------------------------------------


def links_alone(plain: dict[str, Any]) -> dict[str, object]:
    return {"latency": plain["latency"]}


def with_system(plain: dict[str, Any]) -> dict[str, object]:
    return {
        "latency": plain["latency"],
        "efficiency": min(1.0, plain["ideal"] / plain["seconds"]),
        "cores": os.cpu_count(),
        "per_frame": plain["latency"] / 2,
        "per_byte": plain["per_byte"],
    }


KINDS = {"links alone": links_alone, "with TCP, cores": with_system}


def simulated(label: str, race: Race, noop: float, more: dict[str, object]) -> dict[str, Any]:
    shapes = [each.shape for each in make_task(Workload(model=race.model)).model.parameters()]
    efficiency = float(str(more.pop("efficiency", 1)))
    steps = simulate(
        spec=label.removeprefix("topreduce."),
        ranks=race.hosts,
        rate=race.bits * efficiency,
        burst=bucket_bytes(race.bits),
        shapes=",".join("x".join(map(str, shape)) for shape in shapes),
        common=0,
        compute=noop,
        steps=16,
        skip=6,
        **more,
    )
    return means(steps)


def main() -> None:
    claim = Claim("lab", __doc__ or "")
    races = RACES[:1] if claim.quick else RACES
    rounds, repeats = (1, 3) if claim.quick else (8, 15)
    plain = {
        race: Run(
            f"plain TCP, {race.network}",
            lambda race=race: plain_tcp(race.hosts, race.bits, repeats),
        )
        for race in races
    }
    labs = {race: Run(f"lab, {race}", lambda race=race: real(race, rounds)) for race in races}
    found = claim.measure([*plain.values(), *labs.values()])
    races = tuple(each for each in races if {plain[each].name, labs[each].name} <= set(found))

    def count(race: Race, label: str, kind: str) -> dict[str, Any]:
        noop = found[labs[race].name]["noop"]["seconds"]
        return simulated(label, race, noop, KINDS[kind](found[plain[race].name]))

    counted = {
        key: Run(f"simulated {key[2]}, {key[0]}, {key[1]}", lambda key=key: count(*key))
        for key in itertools.product(races, METHODS, KINDS)
    }
    found |= claim.measure(list(counted.values()))
    races = tuple(
        race for race in races
        if all(run.name in found for key, run in counted.items() if key[0] == race)
    )  # fmt: skip

    rows = []
    for race in races:
        row = found[plain[race].name]
        cells = [f"{row['ideal'] * 1e3:.1f} ms", f"{row['seconds'] * 1e3:.1f} ms"]
        cells += [f"{row['ideal'] / row['seconds']:.0%}", f"{row['per_byte'] * 1e9:.1f} ns"]
        rows.append([race.network, *cells, f"{row['latency'] * 1e6:.0f} us"])
    heads = ["", "by the links", "took", "share", "a core, for a byte at either end"]
    claim.table([*heads, "half a round trip"], rows, "tcp")

    rows, lines = [], []
    for race in races:
        steps = found[labs[race].name]
        noop, again = (row["seconds"] for label, row in steps.items() if label[:4] == "noop")
        rows.append([str(race), "noop twice", ms(noop), ms(again), off(again, noop), "", "", ""])
        points = []
        for label in METHODS:
            there = steps[label]["seconds"]
            both = [found[counted[race, label, kind].name] for kind in KINDS]
            cells = [cell for each in both
                     for cell in (ms(each["seconds"]), off(each["seconds"], there))]  # fmt: skip
            sent = f"{steps[label]['bytes'] / 1e6:.2f}, {both[0]['bytes'] / 1e6:.2f}"
            rows.append([str(race), f"`{label}`", ms(there), *cells, sent])
            points.append((there, both[1]["seconds"]))
        lines.append((str(race), sorted(points)))
    heads = ["", "method", "lab", *(head for kind in KINDS for head in (kind, "off by"))]
    claim.table([*heads, "MB, lab and simulated"], rows)
    ends = [each for _, points in lines for point in points for each in point] or [1.0]
    same = ("straight: the same", [(end, end) for end in (min(ends), max(ends))])
    title = "A step of the lab, and the same simulated, with TCP and cores"
    claim.picture(Figure(title, "seconds, lab", "seconds, simulated", [*lines, same], "log", "log"))


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def off(here: float, there: float) -> str:
    return f"{here / there - 1:+.0%}"


if __name__ == "__main__":
    main()
