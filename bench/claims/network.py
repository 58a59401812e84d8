"""Calls bench/network_bench.cpp: steps of a method on a simulated network."""

from __future__ import annotations

import json
import statistics
import subprocess
from typing import Any

from claim import ROOT

PROGRAM = ROOT / "build/bench/bench/network_bench"
Row = dict[str, Any]


def simulate(**words: object) -> list[Row]:
    """The steps that are shown, each with seconds, bytes, messages and entries."""
    if not PROGRAM.exists():
        raise SystemExit(f"{PROGRAM} is missing: ./run claims builds it")
    arguments = [f"{name}={value}" for name, value in words.items()]
    done = subprocess.run([PROGRAM, *arguments], check=True, capture_output=True, text=True)
    steps: list[Row] = json.loads(done.stdout)["steps"]
    return steps


def means(steps: list[Row]) -> Row:
    """Over steps of one kind; the most of "most_bytes"."""
    mean = {name: statistics.fmean(step[name] for step in steps) for name in steps[0]}
    return mean | {"most_bytes": max(step["most_bytes"] for step in steps)}
