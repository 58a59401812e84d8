"""oktopk: what Ok-Topk assumes and approximates, through a training.

4, 8 and 16 ranks train with ok_topk at 1 % (whole model, fp32, as published, the exact thresholds
every 32 steps). In every step: how many entries a rank chose and how many arrived, over k. Every
tenth step, with a_i = owed + gradient of rank i and g the mean gradient:

    xi          |topk(mean a_i) - topk(mean topk(a_i))| / |g|       (assumption 1)
    delivered   |topk(mean a_i) - what arrived| / |g|               (thresholds as they are)
    threshold   the reused one over the exact one of this step: the magnitude at the place n of
                the order over that at the place k, if n entries were chosen
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
from claim import Claim, Run, spread
from figure import Figure
from problems import RECIPES, make
from training import Floats, Look, Training, train

DENSITY, EVERY = 0.01, 10
RANKS = {"fnn": (4, 8, 16), "gpt": (4, 8)}


def strongest(values: Floats, k: int) -> Floats:
    kept = np.zeros_like(values)
    places = np.argpartition(-np.abs(values), k - 1)[:k]
    kept[places] = values[places]
    return kept


def look(seen: Look) -> dict[str, Any]:
    """Counts; of some steps also the vectors."""
    found: dict[str, Any] = {
        "selected": seen.stats.selected,
        "delivered": seen.stats.delivered,
        "k": seen.stats.budget,
    }
    if seen.step % EVERY == EVERY - 1:
        found |= {"a": seen.gradient + seen.owed, "g": seen.gradient, "mean": seen.mean}
    return found


def distances(ranks: list[dict[str, Any]], k: int) -> dict[str, float]:
    """Of one step."""
    all_ranks = [each["a"].astype(np.float64) for each in ranks]
    wanted = strongest(np.mean(all_ranks, axis=0), k)
    two_stages = strongest(np.mean([strongest(each, k) for each in all_ranks], axis=0), k)
    size = float(np.linalg.norm(np.mean([each["g"].astype(np.float64) for each in ranks], axis=0)))
    own = np.sort(np.abs(all_ranks[0]))[::-1]
    chosen = min(max(1, ranks[0]["selected"]), len(own))
    return {
        "xi": float(np.linalg.norm(wanted - two_stages)) / size,
        "delivered": float(np.linalg.norm(wanted - ranks[0]["mean"])) / size,
        "threshold": float(own[chosen - 1] / own[k - 1]),
    }


def run(model: str, ranks: int, seed: int, steps: int) -> dict[str, Any]:
    optimizer, rate = RECIPES[model]
    spec = f"ok_topk:density={DENSITY},values=fp32,granularity=model,warmup_steps={steps // 10}"
    training = Training(spec, ranks, steps, optimizer, rate)
    watched = train(make(model, seed), training, look).watched
    late = range(steps // 10, steps)
    k = max(1, watched[0][-1]["k"])
    found: dict[str, list[float]] = {"xi": [], "delivered": [], "threshold": []}
    for step in late:
        if "a" in watched[0][step]:
            one = distances([each[step] for each in watched], k)
            for name, value in one.items():
                found[name].append(value)
    return {
        **found,
        "selected / k": [watched[0][step]["selected"] / k for step in late],
        "delivered / k": [watched[0][step]["delivered"] / k for step in late],
    }


def main() -> None:
    claim = Claim("oktopk", __doc__ or "")
    seeds, steps = (1, 60) if claim.quick else (3, 200)
    runs = {
        (model, ranks, seed): Run(
            f"{model}, {ranks} ranks, seed {seed}",
            lambda model=model, ranks=ranks, seed=seed: run(model, ranks, seed, steps),
        )
        for seed in range(seeds)
        for model, counts in RANKS.items()
        for ranks in (counts[:1] if claim.quick else counts)
    }
    found = claim.measure(list(runs.values()))
    shown = {key: found[each.name] for key, each in runs.items() if each.name in found}
    columns = ("xi", "delivered", "threshold", "selected / k", "delivered / k")
    rows, lines = [], []
    for model, ranks in dict.fromkeys(key[:2] for key in shown):
        mine = [row for (*what, _), row in shown.items() if what == [model, ranks]]
        cells = [spread([statistics.fmean(row[name]) for row in mine], ".2f") for name in columns]
        most = max(max(row["xi"]) for row in mine)
        rows.append([f"{model}, P = {ranks}", cells[0], f"{most:.2f}", *cells[1:]])
        points = [(steps // 10 + EVERY * (n + 1) - 1, xi) for n, xi in enumerate(mine[0]["xi"])]
        lines.append((f"{model}, {ranks} ranks", points))
    heads = ["1 %", "xi", "most", "as delivered", "threshold, reused / exact",
             "chosen / k", "arrived / k"]  # fmt: skip
    claim.table(heads, rows)
    claim.picture(Figure("xi of assumption 1 through a training", "step", "xi", lines), "xi")
    lines = []
    for model, counts in RANKS.items():
        key = (model, counts[0], 0)
        for name in ("selected / k", "delivered / k"):
            if key in shown:
                label = f"{name.split()[0]}, {model}, {counts[0]} ranks"
                points = [(steps // 10 + n, value) for n, value in enumerate(shown[key][name])]
                lines.append((label, points))
    title = "Entries over k in every step; thresholds are exact every 32 steps"
    claim.picture(Figure(title, "step", "entries / k", lines), "counts")


if __name__ == "__main__":
    main()
