"""What a run leaves behind: results.json, read again by `topreduce lab report`."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from topreduce import __version__
from topreduce.lab.experiments.race import RaceRow
from topreduce.lab.experiments.train import REFERENCE, Evaluation, TrainRun

FORMAT = 1
RESULTS = "results.json"


@dataclass(frozen=True, kw_only=True)
class Results:
    """A race, and the trainings that followed it if any."""

    command: str
    ranks: int
    network: str  # in words
    workload: dict[str, Any]
    delay: float = 0.0  # seconds, one way
    late: float = 0.0  # share of the packets that came a tenth of the delay too late
    clock: str = "real"  # "race": trained without the limit, with the step times of the race
    links: list[dict[str, Any]] = field(default_factory=list)  # what the self-test measured
    race: list[RaceRow] = field(default_factory=list)
    runs: list[TrainRun] = field(default_factory=list)
    target_loss: float | None = None  # asked for; None: what dense reached
    seconds: float | None = None  # every training was this long; None: it went by steps
    date: str = field(default_factory=lambda: _now().strftime("%Y-%m-%d %H:%M UTC"))
    machine: dict[str, str] = field(default_factory=lambda: machine())
    format: int = FORMAT

    def labels(self) -> list[str]:
        """The trained methods, in the order of their first run."""
        return list(dict.fromkeys(run.label for run in self.runs))

    def runs_of(self, label: str) -> list[TrainRun]:
        return [run for run in self.runs if run.label == label]

    def target(self, seed: int) -> float | None:
        """The loss that the runs with this seed were to reach."""
        if self.target_loss is not None:
            return self.target_loss
        ends = (run.final_loss for run in self.runs if run.spec == REFERENCE and run.seed == seed)
        return next((loss for loss in ends if math.isfinite(loss)), None)

    def aim(self) -> float | None:
        """The loss to reach; the mean over seeds, where each has its own."""
        aims = [self.target(seed) for seed in dict.fromkeys(run.seed for run in self.runs)]
        known = [aim for aim in aims if aim is not None]
        return mean(known) if known else None


def save(results: Results, file: Path) -> None:
    """Writes everything that was measured."""
    file.write_text(json.dumps(asdict(results), indent=1) + "\n")


def load(file: Path) -> Results:
    """Reads it back; ValueError if this is something else."""
    try:
        stored = json.loads(file.read_text())
        if stored["format"] != FORMAT:
            raise ValueError(f"{file}: format {stored['format']}, this version reads {FORMAT}")
        stored["race"] = [RaceRow(**row) for row in stored["race"]]
        for run in stored["runs"]:
            run["evaluations"] = [Evaluation(**each) for each in run["evaluations"]]
        stored["runs"] = [TrainRun(**run) for run in stored["runs"]]
        return Results(**stored)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not a results.json of topreduce lab: {error!r}") from None


def named(results: Results, name: str) -> Results:
    """With a name before network and methods, to tell runs apart that stand side by side."""
    return replace(
        results,
        network=f"{name}: {results.network}",
        race=[replace(row, label=f"{name}: {row.label}") for row in results.race],
        runs=[replace(run, label=f"{name}: {run.label}") for run in results.runs],
    )


def new_folder(asked: Path | None, kind: str) -> Path:
    """Where the results go: `asked`, or a new folder below results/ that says when.

    ValueError if it has results: they may have taken hours.
    """
    folder = asked or Path("results") / f"{kind}-{_now():%Y%m%d-%H%M%S}"
    if (folder / RESULTS).exists():
        raise ValueError(f"{folder} has results already: take another folder, or move them away")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def machine() -> dict[str, str]:
    """What the numbers depend on."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "topreduce": __version__,
        "tcp": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
    }


def machine_words(results: Results) -> str:
    """The machine in a line."""
    facts = results.machine
    return (
        f"{facts['processor']}, {facts['cores']} cores, {facts['system']}, "
        f"torch {facts['torch']}, topreduce {facts['topreduce']}, tcp {facts['tcp']}"
    )


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _processor() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _read(file: str) -> str:
    try:
        return Path(file).read_text().strip()
    except OSError:
        return "unknown"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)
