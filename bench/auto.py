"""auto: what attach(model) finds, beside a sweep of fixed densities in the same race.

4 hosts in the lab, `gpt:10m`, at six rates, with --compute 300ms and with real computing. All times
are medians over `noop`, which averages nothing; the A/A column is `noop` a second time. "best
fixed" is the highest density of the sweep whose step takes at most 1.08 times `noop`; where not
even the lowest one does, none. Then one slow host among fast ones, and a rate that changes. Nothing
else may run meanwhile; all of it takes most of an hour.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from rich.console import Console

from topreduce.lab.experiments.methods import parse_methods
from topreduce.lab.experiments.race import RaceOptions, RaceRow, with_again
from topreduce.lab.experiments.runs import Network, race
from topreduce.lab.network.cluster import parse_rates
from topreduce.lab.report.results import RESULTS, save
from topreduce.lab.tasks.models import Workload
from topreduce.units import parse_rate

HOSTS = 4
WITHIN = 1.08  # times noop
WAIT = 0.3  # seconds, instead of computing
RATES = ("50mbit", "100mbit", "200mbit", "500mbit", "1gbit", "none")
SWEEP = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08)
UNEVEN = "1gbit,1gbit,1gbit,50mbit"
CHANGES = ("1gbit", "100mbit", "1gbit")
ROUNDS_OF_CHANGES, TURN_OF_CHANGES = 30, 5  # so that each rate lasts for 50 steps
HEAD = (
    "| network | computing | found | auto | best fixed | fixed densities | dense | A/A | settled |"
)


def rows_of(
    asked: argparse.Namespace, rate: str, compute: float | None, methods: str
) -> list[RaceRow]:
    first, *later = rate.split(" then ")
    network = Network(
        rates=parse_rates(first, HOSTS),
        later=[[limit for limit in parse_rates(word, HOSTS) if limit] for word in later],
    )
    options = RaceOptions(
        workload=Workload(model=asked.model, compute=compute),
        methods=with_again(parse_methods(methods)),
        rounds=ROUNDS_OF_CHANGES if later else asked.rounds,
        steps=TURN_OF_CHANGES if later else 3,
    )
    results = race(Console(stderr=True), network, options, "./run bench auto")
    if asked.out:
        name = f"{rate.replace(' ', '_')}-{'real' if compute is None else 'wait'}"
        (asked.out / name).mkdir(parents=True, exist_ok=True)
        save(results, asked.out / name / RESULTS)
    return results.race


def settled_after(row: RaceRow) -> str:
    """Steps until the density stayed for 20."""
    for step in range(len(row.levels) - 20):
        if len(set(row.levels[step : step + 20])) == 1:
            return str(step)
    return "-"


def line(rate: str, compute: float | None, rows: list[RaceRow]) -> str:
    by_spec = {row.spec: row for row in rows if not row.label.endswith("(A/A)")}
    noop, auto = by_spec["noop"].median, by_spec["auto"]
    again = next(row.median for row in rows if row.label.endswith("(A/A)"))
    fixed = {
        float(spec.split("=")[1]): row.median / noop
        for spec, row in by_spec.items()
        if spec.startswith("topk:")
    }
    fits = [density for density, times in fixed.items() if times <= WITHIN]
    dense = by_spec.get("dense")
    cells = [
        rate,
        "real" if compute is None else f"wait {1e3 * compute:.0f} ms",
        percent(auto),
        f"{auto.median / noop:.3f}",
        f"{max(fits):.1%}" if fits else "none",
        ", ".join(f"{density:.1%}: {times:.3f}" for density, times in fixed.items()),
        f"{dense.median / noop:.2f}" if dense else "",
        f"{again / noop:.3f}",
        settled_after(auto),
    ]
    return "| " + " | ".join(cells) + " |"


def percent(row: RaceRow) -> str:
    """The density of the counted steps."""
    counted = row.levels[len(row.first_seconds) :]
    usual = statistics.mode(counted)
    return f"{float(usual):.2%}" if usual[0].isdigit() else usual


def changes(rows: list[RaceRow]) -> list[str]:
    """What a step takes and sends just before and 30 steps after each change of the rate."""
    noop = next(row for row in rows if row.spec == "noop").median
    lines = []
    for row in (row for row in rows if row.spec not in ("noop",)):
        third = len(row.seconds) // 3
        counted = row.levels[len(row.first_seconds) :] or ["-"] * len(row.seconds)
        for place, rate in enumerate(CHANGES):
            last = slice((place + 1) * third - 20, (place + 1) * third)
            times = statistics.median(row.seconds[last]) / noop
            where = f"{rate}, last 20 of {third} steps"
            lines.append(f"| {where} | {row.label} | {counted[last][-1]} | {times:.3f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument(
        "--computing", nargs="+", choices=["wait", "real"], default=["wait", "real"]
    )
    parser.add_argument("--only", choices=["sweep", "uneven", "changes"])
    parser.add_argument("--model", default="gpt:10m")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, help="keep the results of each race in this folder")
    asked = parser.parse_args()
    sweep = ",".join(f"topk:density={density}" for density in SWEEP)
    if asked.only in (None, "sweep"):
        print(f"\n{HEAD}\n{'|---' * HEAD.count(' | ')}|---|", flush=True)
        for word in asked.computing:
            compute = WAIT if word == "wait" else None
            for rate in asked.rates:
                dense = ",dense" if parse_rate(rate) is None else ""
                rows = rows_of(asked, rate, compute, f"noop,auto,{sweep}{dense}")
                print(line(rate, compute, rows), flush=True)
    if asked.only in (None, "uneven"):
        for rate in (UNEVEN, "50mbit"):
            rows = rows_of(asked, rate, WAIT, "noop,auto,topk:density=0.005,topk:density=0.01")
            print(line(rate, WAIT, rows), flush=True)
    if asked.only in (None, "changes"):
        rows = rows_of(
            asked, " then ".join(CHANGES), WAIT, "noop,auto,topk:density=0.01,topk:density=0.02"
        )
        print("\n| rate | method | sends | times noop |\n|---|---|---|---|")
        print("\n".join(changes(rows)), flush=True)


if __name__ == "__main__":
    main()
