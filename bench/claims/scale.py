"""scale: the time of an exchange on simulated networks, and what it says of the papers' headlines.

The real code runs on tests/simulated_network.h; real bytes move, time is counted. Three runs of
each method and number of ranks, 262 144 and 1 M entries (sparse methods on 256 ranks: a quarter of
both, to fit in memory), give the cost formula

    seconds = latency part + (headers + bytes per entry x entries) / rate

and a fourth, at another size and rate, shows how well it holds. Larger models are extrapolated.
Links have a latency of 50 us; every rank is a host of its own. Processors cost nothing here.
Whole model at once, values in fp32, as published, unless a row says otherwise.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from claim import Claim, Run
from figure import Figure
from network import means, simulate

LATENCY = 50e-6
RATE = 1e9
SMALL, LARGE, BETWEEN = 64, 256, 160  # rows of 2048 in each of two tensors
BERT, RESNET, LLAMA = 133_547_324, 25_560_000, 1_000_000_000
RANKS = (4, 8, 16, 32, 64, 256)
METHODS = {
    "dense": "dense:granularity=model",
    "topk 1 %": "topk:density=0.01,granularity=model,values=fp32",
    "topk_dsa 1 %": "topk_dsa:density=0.01,granularity=model,values=fp32",
    "gtopk 1 %": "gtopk:density=0.01,granularity=model,values=fp32",
    "ok_topk 1 %": "ok_topk:density=0.01,granularity=model,values=fp32",
    "arc_topk 20 %": "arc_topk:density=0.2,granularity=model,values=fp32",
    "gaussiank 0.1 %": "gaussiank:density=0.001,granularity=model,values=fp32",
    "ok_topk 1 %, ours": "ok_topk:density=0.01,granularity=model",
    "arc_topk 20 %, ours": "arc_topk:density=0.2,granularity=model",
    "dense, 4 bits, ours": "dense:granularity=model,values=int4,feedback=residual",
}
PUBLISHED = ("dense", "topk 1 %", "topk_dsa 1 %", "gtopk 1 %", "ok_topk 1 %")
# What also runs on more than 64 ranks, and on the clusters.
FEW = (*PUBLISHED, "arc_topk 20 %")
# From what learns most to what sends least: the first that ends within a backward pass is taken.
CHOICE = ("dense", "dense, 4 bits, ours", "arc_topk 20 %, ours", "ok_topk 1 %, ours")
BACKWARD = 0.12  # seconds, of ResNet-50 in the code of Gaussian-K's authors


@dataclass(frozen=True)
class Cost:
    """The formula of one method on one number of ranks; bytes are on the wire of the busiest."""

    latency: float
    headers: float
    per_entry: float
    error: float  # of the fourth run, as a share

    def seconds(self, entries: float, rate: float) -> float:
        return self.latency + (self.headers + self.per_entry * entries) / (rate / 8)


def sizes(spec: str, ranks: int) -> list[int]:
    """Rows of 2048 in each of two tensors; what all ranks receive of all others must fit."""
    less = 4 if ranks > 64 and not spec.startswith("dense") else 1
    return [rows // less for rows in (SMALL, LARGE, BETWEEN)]


def fit(spec: str, ranks: int, row: dict[str, Any]) -> Cost:
    small, large, between = (2 * 2048 * rows for rows in sizes(spec, ranks))
    slope = (row["large"] - row["small"]) / (large - small)
    latency = row["no bytes"]
    headers = row["small"] - latency - slope * small
    cost = Cost(latency, headers * RATE / 8, slope * RATE / 8, 0)
    wanted = row["check"]
    error = abs(cost.seconds(between, RATE / 4) - wanted) / wanted
    return Cost(cost.latency, cost.headers, cost.per_entry, error)


def run(spec: str, ranks: int, steps: int) -> dict[str, Any]:
    if spec.startswith("ok_topk"):
        steps += 8  # what a reused threshold lets through differs from step to step
    if ranks > 64:
        steps = 6 if spec.startswith("ok_topk") else 3

    def seconds(rows: int, rate: object) -> float:
        found = simulate(
            spec=spec, ranks=ranks, latency=LATENCY, rate=rate, shapes=f"{rows}x2048*2",
            steps=steps, skip=2,
        )  # fmt: skip
        return float(means(found)["seconds"])

    small, large, between = sizes(spec, ranks)
    return {
        "no bytes": seconds(small, "inf"),
        "small": seconds(small, RATE),
        "large": seconds(large, RATE),
        "check": seconds(between, RATE / 4),
    }


# 32 ranks with 1 M entries at 1 Gb/s; inside a host 80 Gb/s.
CLUSTERS: dict[str, dict[str, Any]] = {
    "32 hosts": {},
    "8 hosts of 4 ranks": {"ranks_per_host": 4},
    "32 hosts, one at 100 Mb/s": {"slow_rate": 1e8},
}


def on_cluster(spec: str, cluster: str, ranks: int) -> dict[str, Any]:
    more = CLUSTERS[cluster]
    steps = simulate(
        spec=spec, ranks=ranks, latency=LATENCY, rate=RATE, shapes=f"{LARGE}x2048*2",
        steps=6, skip=2, **more,
    )  # fmt: skip
    return {"seconds": means(steps)["seconds"]}


def number(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def main() -> None:
    claim = Claim("scale", __doc__ or "")
    ranks: Sequence[int] = (4, 8, 16) if claim.quick else RANKS
    steps = 4 if claim.quick else 6
    runs = {
        (method, count): Run(
            f"{method}, {count} ranks",
            lambda spec=spec, count=count: run(spec, count, steps),
        )
        for count in ranks
        for method, spec in METHODS.items()
        if count <= 64 or method in FEW
    }
    clusters = {
        (method, cluster): Run(
            f"{method}, {cluster}",
            lambda spec=spec, cluster=cluster: on_cluster(spec, cluster, 32),
        )
        for method, spec in METHODS.items()
        for cluster in CLUSTERS
        if method in FEW and not claim.quick
    }
    found = claim.measure([*runs.values(), *clusters.values()])
    costs = {
        (method, count): fit(METHODS[method], count, found[each.name])
        for (method, count), each in runs.items()
        if each.name in found
    }
    ranks = [count for count in ranks if all((method, count) in costs for method in PUBLISHED)]
    errors = [cost.error for cost in costs.values()]
    print(
        f"\nthe fourth runs: median off by {statistics.median(errors):.1%}, most {max(errors):.1%}"
    )

    largest = ranks[-1]
    rows = []
    for rate, words in ((1e9, "1 Gb/s"), (10e9, "10 Gb/s"), (80e9, "80 Gb/s")):
        for count in [each for each in ranks if each >= 32] or [largest]:
            times = {method: costs[method, count].seconds(BERT, rate) for method in PUBLISHED}
            ok = times["ok_topk 1 %"]
            ratios = [times[method] / ok for method in PUBLISHED if method != "ok_topk 1 %"]
            cells = [number(times[method]) for method in PUBLISHED]
            rows.append([words, count, *cells, f"{min(ratios):.2f} to {max(ratios):.2f}"])
    claim.table(["rate", "P", *PUBLISHED, "others / ok_topk"], rows, "bert")

    rows = []
    for count in [each for each in ranks if each <= 64]:
        for rate, words in ((1e9, "1 Gb/s"), (10e9, "10 Gb/s")):
            dense = costs["dense", count].seconds(LLAMA, rate)
            arc = costs["arc_topk 20 %", count].seconds(LLAMA, rate)
            ours = costs["arc_topk 20 %, ours", count].seconds(LLAMA, rate)
            saved = [1 - each / dense for each in (arc, ours)]
            # A quarter of the dense step computes; what is left waits for the network.
            shared = 1 - (dense / 3 + arc) / (dense / 3 + dense)
            cells = [
                number(dense),
                number(arc),
                f"{saved[0]:.1%}",
                f"{shared:.1%}",
                f"{saved[1]:.1%}",
            ]
            rows.append([count, words, *cells])
    heads = [
        "nodes",
        "rate",
        "dense",
        "ARC 20 %",
        "saved",
        "saved if 1/4 computes",
        "saved, 4-bit values",
    ]
    claim.table(heads, rows, "llama")

    rows = []
    for rate, words in ((1e9, "1 Gb/s"), (10e9, "10 Gb/s")):
        dense, sparse = (
            costs[method, 16].seconds(RESNET, rate) for method in ("dense", "gaussiank 0.1 %")
        )
        compute = 0.21  # forward and backward, a constant of the authors' repository
        rows.append([words, number(dense), number(sparse), f"{dense / sparse:.0f}",
                     f"{(compute + dense) / (compute + sparse):.2f}"])  # fmt: skip
    heads = ["rate", "dense", "gaussiank", "exchange, times", "step of 0.21 s computing, times"]
    claim.table(heads, rows, "resnet")

    rows = []
    columns = [each for each in METHODS if "gaussiank" not in each]
    for rate, words in ((100e6, "100 Mb/s"), (1e9, "1 Gb/s"), (10e9, "10 Gb/s")):
        for count in ranks:
            times = {
                method: costs[method, count].seconds(RESNET, rate)
                for method in columns
                if (method, count) in costs
            }
            cells = [number(times[each]) if each in times else "-" for each in columns]
            rows.append([words, count, *cells])
    claim.table(["rate", "ranks", *columns], rows, "when")

    rows = []
    chosen_for = [count for count in ranks if all((method, count) in costs for method in CHOICE)]
    for rate, words in ((100e6, "100 Mb/s"), (1e9, "1 Gb/s"), (10e9, "10 Gb/s"), (80e9, "80 Gb/s")):
        cells = []
        for count in chosen_for:
            times = {method: costs[method, count].seconds(RESNET, rate) for method in CHOICE}
            quickest = min(times, key=lambda method: times[method])
            fits = [method for method, seconds in times.items() if seconds <= BACKWARD]
            cells.append(fits[0] if fits else f"{quickest} ({number(times[quickest])})")
        rows.append([words, *cells])
    claim.table(["rate", *(f"{count} ranks" for count in chosen_for)], rows, "choice")

    rows = [
        [method, *(number(found[clusters[method, each].name]["seconds"]) for each in CLUSTERS)]
        for method in METHODS
        if all((method, each) in clusters for each in CLUSTERS)
        and all(clusters[method, each].name in found for each in CLUSTERS)
    ]
    claim.table(["32 ranks, 1 M entries, 1 Gb/s", *CLUSTERS], rows, "clusters")

    lines = [
        (method, [(n, costs[method, n].seconds(BERT, 10e9)) for n in ranks if (method, n) in costs])
        for method in METHODS
        if "gaussiank" not in method
    ]
    title = "Extrapolated: seconds of one exchange, 133.5 M entries, 10 Gb/s"
    claim.picture(Figure(title, "ranks", "seconds", lines, "log", "log"))


if __name__ == "__main__":
    main()
