"""volume: what a rank sends as ranks grow, beside the formulas of the Ok-Topk paper.

1 M entries in 40 parameters, density 1 %, whole model at once, as published; half of the gradients'
variance is the same on all ranks. Formulas count words of 4 bytes, two for an entry: topk (TopkA)
2k(P-1), topk_dsa from 4k(P-1)/P to (2k+n)(P-1)/P, gtopk 4k log2 P, ok_topk from 2k(P-1)/P to
6k(P-1)/P, dense 2n(P-1)/P. With values=fp32 an entry of ours takes 4 bytes and those of its place;
the default are 4-bit values.
"""

from __future__ import annotations

import math
from typing import Any

from claim import Claim, Run
from figure import Figure
from network import means, simulate

ENTRIES, K = 1_000_000, 10_000
PERIOD, TAU = 4, 8
STEPS = TAU + 1
METHODS = ("topk", "topk_dsa", "gtopk", "ok_topk", "randk", "arc_topk", "dense")
KINDS = {"ordinary": (1, 2, 3), "exact": (PERIOD,), "regions": (0,)}  # by step modulo TAU


def words(method: str, ranks: int) -> tuple[float, float]:
    """The paper's words of a rank, least and most."""
    share = (ranks - 1) / ranks
    k, n = float(K), float(ENTRIES)
    return {
        "topk": (2 * k * (ranks - 1),) * 2,
        "topk_dsa": (4 * k * share, (2 * k + n) * share),
        "gtopk": (4 * k * math.log2(ranks),) * 2,
        "ok_topk": (2 * k * share, 6 * k * share),
        "randk": (2 * k * share,) * 2,
        "arc_topk": (2 * (k + 4 * ENTRIES / 100) * share,) * 2,
        "dense": (2 * n * share,) * 2,
    }[method]


def spec(method: str, values: str) -> str:
    more = f",exchange=(ok_topk:period={PERIOD},tau={TAU})" if method == "ok_topk" else ""
    if method == "ok_topk":
        more += f",select=(reused:period={PERIOD})"
    density = "" if method == "dense" else f"density={K / ENTRIES},"
    return f"{method}:{density}granularity=model,values={values}{more}"


def run(method: str, ranks: int, values: str) -> dict[str, Any]:
    kinds = method == "ok_topk"
    steps = simulate(
        spec=spec(method, values),
        ranks=ranks,
        rate="inf",
        latency=0,
        steps=STEPS if kinds else 3,
        skip=1 if kinds else 2,
    )
    if not kinds:
        return {"ordinary": means(steps)}
    return {
        kind: means([step for step in steps if step["step"] % TAU in places])
        for kind, places in KINDS.items()
    }


def main() -> None:
    claim = Claim("volume", __doc__ or "")
    ranks = [4, 8, 16] if claim.quick else [4, 8, 16, 32, 64, 256]
    formats = {"fp32": METHODS, "auto": ("topk", "ok_topk", "arc_topk")}
    runs = {
        (method, count, values): Run(
            f"{method}, {values}, {count} ranks",
            lambda method=method, count=count, values=values: run(method, count, values),
        )
        for count in ranks
        for values, methods in formats.items()
        for method in methods
        if count <= 64 or values == "fp32"
    }
    found = claim.measure(list(runs.values()))
    shown = {key: found[each.name] for key, each in runs.items() if each.name in found}
    ranks = [count for count in ranks if all((m, count, "fp32") in shown for m in METHODS)]

    def in_k(method: str, count: int, values: str, kind: str = "ordinary") -> float:
        return float(shown[method, count, values][kind]["bytes"]) / 4 / K

    rows = []
    for method in METHODS:
        for kind in shown[method, ranks[0], "fp32"]:
            cells = []
            for count in ranks:
                row = shown[method, count, "fp32"][kind]
                cells.append(f"{row['bytes'] / 4 / K:.2f} ({row['messages']:.0f})")
            name = f"{method}, {kind} step" if method == "ok_topk" else method
            rows.append([name, *cells])
        low, high = zip(*(words(method, count) for count in ranks), strict=True)
        same = low == high
        bounds = [
            f"{a / K:.2f}" if same else f"{a / K:.2f} to {b / K:.2f}"
            for a, b in zip(low, high, strict=True)
        ]
        rows.append([f"{method}, formula", *bounds])
    claim.table(["words / k (messages)", *(f"P = {count}" for count in ranks)], rows)
    lines = [(each, [(n, in_k(each, n, "fp32")) for n in ranks]) for each in METHODS]
    lines.append(("bound 6k(P-1)/P", [(n, 6 * (n - 1) / n) for n in ranks]))
    lines.append(("bound 2k(P-1)/P", [(n, 2 * (n - 1) / n) for n in ranks]))
    title = "What a rank sends in a step, 1 % of 1 M entries, values in fp32"
    claim.picture(Figure(title, "ranks", "words of 4 bytes / k", lines, "log", "log"))


if __name__ == "__main__":
    main()
