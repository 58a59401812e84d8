"""selection: how long choosing 0.1 % takes, by the number of entries, for every selector.

One rank, one thread, the whole model at once: the seconds of the stages look and choose, beside
torch.topk of the magnitudes. Heavy-tailed entries; the median of some steps after the first two.
`topk` runs twice: what the two differ by is noise (A/A).
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from claim import Claim, Run
from figure import Figure

from topreduce import Communicator, Layout, Reducer, run_ranks

AGAIN = "topk (A/A)"
SELECTORS = ("topk", "carried", "reused", "gaussiank", "dgc", "redsync", AGAIN)
DENSITY = 0.001


def entries_of(n: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    scale = np.exp(0.7 * rng.standard_normal(n, dtype=np.float32))
    return rng.standard_normal(n, dtype=np.float32) * scale


def ours(select: str, n: int, steps: int = 9) -> dict[str, Any]:
    def body(comm: Communicator) -> list[float]:
        reducer = Reducer(
            Layout([("x", (n,))]),
            f"topk:density={DENSITY},granularity=model,select={select.removesuffix(' (A/A)')}",
        )
        gradients = [entries_of(n, seed) for seed in range(3)]
        seconds = []
        for step in range(steps):
            values = gradients[step % 3].copy()
            reducer.begin(comm)
            reducer.add([0], values)
            spent = reducer.finish().seconds
            seconds.append(spent["look"] + spent["choose"])
        return seconds

    return {"seconds": statistics.median(run_ranks(1, body)[0][2:])}


def torchs(n: int, steps: int = 5) -> dict[str, Any]:
    torch.set_num_threads(1)
    values = torch.from_numpy(entries_of(n, 0))
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        values.abs().topk(max(1, int(DENSITY * n)), sorted=False)
        seconds.append(time.perf_counter() - started)
    return {"seconds": statistics.median(seconds)}


def main() -> None:
    claim = Claim("selection", __doc__ or "")
    sizes = [2**n for n in ((14, 16) if claim.quick else (14, 16, 18, 20, 22, 24))]
    runs = {("torch.topk", n): Run(f"torch.topk, {n}", lambda n=n: torchs(n)) for n in sizes}
    for select in SELECTORS:
        for n in sizes:
            runs[select, n] = Run(f"{select}, {n}", lambda select=select, n=n: ours(select, n))
    found = claim.measure(list(runs.values()))
    names = ("torch.topk", *SELECTORS)
    shown = {key: found[run.name]["seconds"] for key, run in runs.items() if run.name in found}
    rows = [[name, *(f"{shown[name, n] * 1e3:.2f}" for n in sizes)] for name in names]
    claim.table(["ms, 0.1 %", *(f"n = {n}" for n in sizes)], rows)
    lines = [(name, [(n, shown[name, n] * 1e3) for n in sizes]) for name in names]
    title = "Time to choose 0.1 % of n entries, one thread"
    claim.picture(Figure(title, "entries", "ms", lines, "log", "log"))


if __name__ == "__main__":
    main()
