"""lab: is the simulated network right? Races on the lab's emulated one, beside simulated ones.

The lab runs real processes, TCP and limited links; the simulation runs the same code, and counts
time, with the rates, bursts and waits of the lab. Two simulations are shown beside the lab:

    links alone      what is sent waits for links, and nothing else takes time
    with TCP, cores  links as quick as plain TCP makes them when all hosts send to all at once, and
                     the cores of this machine, which all hosts share: for what the library
                     computes, what Python and PyTorch do around it, and what the system takes to
                     move bytes

What TCP makes of the links and what it takes of the cores is measured with bare sockets on the same
links, without a line of the library (`tcp.py`). Hosts wait 50 ms instead of computing, which
takes no core. What their processes take of the cores is measured where nothing is sent, with each
process in a group of its own (`processor.py`), for `noop` and for every method. The simulation runs
the library itself, so that one simulated rank tells what to take off (`library`). "Links alone"
waits for as long as `noop` takes in the race. Nothing else may run meanwhile.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claim import Claim, Run
from figure import Figure
from network import means, simulate
from processor import PARTS, Options, processor_seconds
from tcp import plain_tcp

from topreduce.lab.network.cluster import bucket_bytes, rate_words
from topreduce.lab.tasks.models import Workload, make_task
from topreduce.units import parse_rate

MODEL = "gpt:1m"
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
    rate: str

    def __str__(self) -> str:
        return f"{self.network}, {MODEL}"

    @property
    def network(self) -> str:
        return f"{self.hosts} hosts, {rate_words(self.bits)}"

    @property
    def bits(self) -> float:
        rate = parse_rate(self.rate)
        assert rate is not None
        return rate


RACES = (
    Race(4, "100mbit"),
    Race(8, "100mbit"),
    Race(4, "1gbit"),
    Race(8, "1gbit"),
)


def real(race: Race, rounds: int) -> dict[str, Any]:
    """The median step of each method, and the bytes at a host's interface."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "topreduce", "lab", "race", "--model", MODEL]
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


@dataclass(frozen=True)
class Measured:
    """What a simulation is told of a race."""

    noop: float  # seconds of its step in the race
    tcp: dict[str, Any]  # see `plain_tcp`
    waiting: float  # seconds of a step of noop in which its process does not work
    work: dict[str, float]  # seconds of a processor, by part of the step, besides the library


def links_alone(seen: Measured) -> dict[str, object]:
    return {"latency": seen.tcp["latency"], "compute": seen.noop}


def with_system(seen: Measured) -> dict[str, object]:
    tcp = seen.tcp
    return {
        "latency": tcp["latency"],
        "efficiency": min(1.0, tcp["ideal"] / tcp["seconds"]),
        "cores": os.cpu_count(),
        "per_frame": tcp["latency"] / 2,
        "per_byte": tcp["per_byte"],
        "compute": seen.waiting,
        **{f"{part}_work": seconds for part, seconds in seen.work.items()},
        "period": 3,  # all ranks begin a step together, as in the lab
    }


KINDS = {"links alone": links_alone, "with TCP, cores": with_system}


def simulated(label: str, race: Race, more: dict[str, object]) -> dict[str, Any]:
    efficiency = float(str(more.pop("efficiency", 1)))
    rate, burst = race.bits * efficiency, bucket_bytes(race.bits)
    return steps_of(label, ranks=race.hosts, rate=rate, burst=burst, **more)


def library(label: str) -> dict[str, float]:
    """Seconds of a processor that the library takes of a step with nobody to exchange with."""
    found = steps_of(label, ranks=1, cores=1)
    until_last = found["seconds"] - found["after"]
    return {"forward": 0.0, "backward": until_last, "after": found["after"]}


def steps_of(label: str, **words: object) -> dict[str, Any]:
    parameters = make_task(Workload(model=MODEL)).model.parameters()
    shapes = ",".join("x".join(map(str, each.shape)) for each in parameters)
    spec = label.removeprefix("topreduce.")
    return means(simulate(spec=spec, shapes=shapes, common=0, steps=16, skip=6, **words))


# ---- all of it ----------------------------------------------------------------------------------


class Runs:
    """What is measured for these races, and then simulated."""

    def __init__(self, races: Sequence[Race], rounds: int, repeats: int) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self.races = list(races)  # of which all is known
        self.tcp = {
            race: Run(
                f"plain TCP, {race.network}",
                lambda race=race: plain_tcp(race.hosts, race.bits, repeats),
            )
            for race in races
        }
        self.lab = {
            race: Run(f"lab, {race}", lambda race=race: real(race, rounds)) for race in races
        }

        def work(processes: int) -> dict[str, Any]:
            labels = ("noop", *METHODS) if processes > 1 else ("noop",)
            options = Options(Workload(model=MODEL, compute=COMPUTE), labels, rounds)
            return processor_seconds(processes, options)

        self.work = {
            processes: Run(
                f"work, {processes} at once, {MODEL}", lambda processes=processes: work(processes)
            )
            for processes in sorted({1, *(race.hosts for race in races)})
        }
        self.library = {
            label: Run(f"work, library alone, {MODEL}, {label}", lambda label=label: library(label))
            for label in METHODS
        }
        self.simulated = {
            (race, label, kind): Run(
                f"simulated {kind}, {race}, {label}",
                lambda label=label, race=race, kind=kind: simulated(
                    label, race, KINDS[kind](self.measured(race, label))
                ),
            )
            for race, label, kind in itertools.product(races, ("noop", *METHODS), KINDS)
            if label != "noop" or kind != "links alone"
        }

    def make(self, claim: Claim) -> None:
        first = (self.tcp, self.work, self.library, self.lab)
        self.found = claim.measure([run for runs in first for run in runs.values()])
        self.found |= claim.measure(list(self.simulated.values()))
        self.races = [race for race in self.races if self._is_known(race)]

    def _is_known(self, race: Race) -> bool:
        runs = [self.tcp[race], self.lab[race], self.work[1], self.work[race.hosts]]
        runs += self.library.values()
        runs += [run for key, run in self.simulated.items() if key[0] == race]
        return all(run.name in self.found for run in runs)

    def __getitem__(self, run: Run) -> dict[str, Any]:
        return self.found[run.name]

    def measured(self, race: Race, label: str) -> Measured:
        lone = self[self.work[1]]["noop"]
        taken = self[self.work[race.hosts]][label]
        known = self[self.library[label]] if label in METHODS else {}
        return Measured(
            noop=self[self.lab[race]]["noop"]["seconds"],
            tcp=self[self.tcp[race]],
            waiting=lone["seconds"] - sum(lone[part] for part in PARTS),
            work={part: max(0.0, taken[part] - known.get(part, 0.0)) for part in PARTS},
        )


def main() -> None:
    claim = Claim("lab", __doc__ or "")
    races = RACES[:1] if claim.quick else RACES
    rounds, repeats = (1, 3) if claim.quick else (8, 15)
    runs = Runs(races, rounds, repeats)
    runs.make(claim)
    show_tcp(claim, runs)
    show_work(claim, runs)
    show_races(claim, runs)


def show_tcp(claim: Claim, runs: Runs) -> None:
    rows = []
    for race in runs.races:
        row = runs[runs.tcp[race]]
        cells = [f"{row['ideal'] * 1e3:.1f} ms", f"{row['seconds'] * 1e3:.1f} ms"]
        cells += [f"{row['ideal'] / row['seconds']:.0%}", f"{row['per_byte'] * 1e9:.1f} ns"]
        rows.append([race.network, *cells, f"{row['latency'] * 1e6:.0f} us"])
    heads = ["", "by the links", "took", "share", "a core, for a byte at either end"]
    claim.table([*heads, "half a round trip"], rows, "tcp")


def show_work(claim: Claim, runs: Runs) -> None:
    sizes = sorted({race.hosts for race in runs.races})
    rows = []
    for label in ("noop", *METHODS) if sizes else ():
        cells = [tenths(total(runs[runs.work[size]][label])) for size in sizes]
        part = tenths(total(runs[runs.library[label]])) if label in METHODS else ""
        rows.append([f"`{label}`", *cells, part])
    heads = [f"{size} processes at once" for size in sizes]
    heads = ["a core, for a step of a process", *heads, "the library's part"]
    claim.table(heads, rows, "work")


def show_races(claim: Claim, runs: Runs) -> None:
    rows, lines = [], []
    for race in runs.races:
        steps = runs[runs.lab[race]]
        noop, again = (row["seconds"] for label, row in steps.items() if label[:4] == "noop")
        idle = runs[runs.simulated[race, "noop", "with TCP, cores"]]["seconds"]
        cells = [ms(noop), ms(again), off(again, noop), ms(idle), off(idle, noop)]
        rows.append([str(race), "noop twice", *cells, ""])
        points = []
        for label in METHODS:
            there = steps[label]["seconds"]
            both = [runs[runs.simulated[race, label, kind]] for kind in KINDS]
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


def total(taken: dict[str, float]) -> float:
    return sum(taken[part] for part in PARTS)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def tenths(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def off(here: float, there: float) -> str:
    return f"{here / there - 1:+.0%}"


if __name__ == "__main__":
    main()
