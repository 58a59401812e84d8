"""selection: torch.topk on a flat gradient, beside what the C++ stages cost.

Runs stages_bench first; then, in torch and on one thread, `owed += gradient` and torch.topk over
the same number of heavy-tailed entries. Each table is relative to its own owed += gradient.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

ENTRIES = 26_000_000
REPETITIONS = 5
STAGES = Path("build/bench/bench/stages_bench")


def milliseconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    if STAGES.exists():
        subprocess.run([STAGES], check=True)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(ENTRIES, generator=generator)
    gradient *= torch.exp(0.7 * torch.randn(ENTRIES, generator=generator))
    owed = torch.zeros(ENTRIES)
    rows: dict[str, Callable[[], object]] = {
        "torch: owed += gradient": lambda: owed.add_(gradient),
        "torch: owed += gradient (A/A)": lambda: owed.add_(gradient),
        "torch.topk of |x|, 0.1 %": lambda: gradient.abs().topk(ENTRIES // 1000, sorted=False),
        "torch.topk of |x|, 1 %": lambda: gradient.abs().topk(ENTRIES // 100, sorted=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(REPETITIONS):
        for name, action in rows.items():
            seconds[name].append(milliseconds(action))
    baseline = statistics.median(seconds["torch: owed += gradient"])
    print(f"{'':46} {'median ms':>9} {'ratio':>15}")
    for name, each in seconds.items():
        median = statistics.median(each)
        print(f"{name:46} {median:9.3f} {median / baseline:15.3f}")


if __name__ == "__main__":
    main()
