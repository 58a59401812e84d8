"""contraction: what each method leaves of real gradients, beside its bound.

Every tenth step of a training with topk at 10 % gives the vectors that the ranks would send, owed
and gradient together. Each method compresses them without memory; shown is
|mean of what is kept - true mean|^2 / |true mean|^2, which must stay below 1 for a contraction.
Bounds: 1 - k/d (Rand-K, by expectation), (1 - k/d)^2 (Top-K of a bell-shaped vector, one rank),
1 - c(m, r) K/m (ARC-Top-K, our derivation; docs/algorithms.md), worst tensor of the
model. Two kinds of data: alike on all ranks, and a part of its own for every rank.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
from claim import Claim, Run, spread
from figure import Figure
from problems import RECIPES, make
from training import Floats, Look, Training, compressed, layout_of, relative_error, train

RANKS = 4
DENSITIES = (0.001, 0.01, 0.05, 0.2)
METHODS = {
    "topk, one rank": "topk",
    "topk": "topk",
    "ok_topk": "ok_topk",
    "randk": "randk",
    "arc_topk": "arc_topk",
    "arc_topk, ranked=model": "arc_topk:ranked=model",
}


def look(seen: Look) -> Floats:
    return seen.gradient + seen.owed


def sample_vectors(model: str, seed: int, skewed: bool, steps: int) -> list[list[Floats]]:
    """By step, one of each rank."""
    optimizer, rate = RECIPES[model]
    training = Training(
        "topk:density=0.1,values=fp32,granularity=model", RANKS, steps, optimizer, rate
    )
    outcome = train(make(model, seed, RANKS if skewed else 0), training, look, 10)
    return list(map(list, zip(*outcome.watched, strict=True)))


def measure(model: str, seed: int, skewed: bool, steps: int) -> dict[str, Any]:
    vectors = sample_vectors(model, seed, skewed, steps)
    layout = layout_of(make(model, seed)().model)
    found: dict[str, dict[str, list[float]]] = {}
    for label, method in METHODS.items():
        for density in DENSITIES:
            if method.startswith("arc") and density < 0.01:
                continue  # its sketches alone are more
            errors = []
            for number, inputs in enumerate(vectors):
                some = inputs[:1] if label.endswith("one rank") else inputs
                mean = np.mean(np.asarray(some, dtype=np.float64), axis=0).astype(np.float32)
                more = "," if ":" in method else ":"
                spec = f"{method}{more}density={density},values=fp32"
                out, _ = compressed(some, layout, spec, seed=number)
                errors.append(relative_error(out, mean))
            found.setdefault(label, {})[str(density)] = errors
    return {
        "errors": found,
        "arc_bound": {str(each): arc_bound(layout.shapes, each) for each in DENSITIES},
    }


def arc_bound(shapes: list[list[int]], density: float, sketch: int = 4) -> float:
    """Of the worst tensor with rows."""
    worst = 0.0
    for shape in shapes:
        if len(shape) < 2 or sketch >= math.prod(shape[1:]):
            continue
        m, r = shape[0], sketch
        c = (1 - 1 / (2 * r)) / (1 + 2 * math.sqrt(math.log(m) / r) + 2 * math.log(m) / r)
        worst = max(worst, 1 - c * max(1, round(density * m)) / m)
    return worst


def main() -> None:
    claim = Claim("contraction", __doc__ or "")
    models = ["fnn"] if claim.quick else ["gpt", "lstm", "cnn", "fnn"]
    seeds, steps = (1, 40) if claim.quick else (3, 80)
    runs = {
        (model, skewed, seed): Run(
            f"{model}, {'ranks differ' if skewed else 'ranks alike'}, seed {seed}",
            lambda model=model, seed=seed, skewed=skewed: measure(model, seed, skewed, steps),
        )
        for seed in range(seeds)
        for model in models
        for skewed in (False, True)
    }
    found = claim.measure(list(runs.values()))
    shown = {key: found[run.name] for key, run in runs.items() if run.name in found}
    for skewed, name in ((False, "alike"), (True, "differ")):
        rows = []
        for model in models:
            for density in ("0.01", "0.2"):
                cells = []
                for label in METHODS:
                    means = [
                        statistics.fmean(row["errors"][label][density])
                        for (m, s, _), row in shown.items()
                        if (m, s) == (model, skewed)
                    ]
                    cells.append(spread(means))
                share = float(density)
                bound = next(
                    row["arc_bound"][density] for (m, _, _), row in shown.items() if m == model
                )
                rows.append(
                    [
                        f"{model}, {share:.0%}",
                        *cells,
                        f"{1 - share:.2f}",
                        f"{(1 - share) ** 2:.4f}",
                        f"{bound:.3f}",
                    ]
                )
        heads = ["", *METHODS, "1 - k/d", "(1 - k/d)²", "1 - cK/m"]
        claim.table(heads, rows, name)
        lines = []
        for label in METHODS:
            points = []
            for density in DENSITIES:
                each = [
                    error
                    for (m, s, _), row in shown.items()
                    if s == skewed and m == models[0]
                    for error in row["errors"][label].get(str(density), [])
                ]
                if each:
                    points.append((density, statistics.fmean(each)))
            lines.append((label, points))
        lines.append(("1 - k/d", [(d, 1 - d) for d in DENSITIES]))
        lines.append(("(1 - k/d)²", [(d, (1 - d) ** 2) for d in DENSITIES]))
        title = f"Error of the mean, {models[0]}, {RANKS} ranks; their data: {name}"
        claim.picture(Figure(title, "density", "|error|² / |mean|²", lines, "log"), name)


if __name__ == "__main__":
    main()
