"""gaussian: the pictures of Gaussian-K: is what ranks owe bell-shaped, and is the bound kept?

Four ranks train with topk at 0.1 % (whole model, residual, as published): an FNN, a CNN, an LSTM
and a GPT. Now and then: a histogram of owed + gradient in units of its deviation, the ordered
squares that the theorem is about, and the share that Top-K leaves, over k, beside 1 - k/d and
(1 - k/d)^2. Then gaussiank itself at 0.1 % on 16 ranks: how many entries it sends, over k, and what
is learnt. There the first tenth of the steps is dense, and over the next tenth the density falls;
the authors begin with 1.6 and 0.4 % instead.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
from claim import Claim, Run, spread
from figure import Figure
from problems import RECIPES, make
from training import Look, Training, train

MODELS = ("fnn", "cnn", "lstm", "gpt")
SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
EDGES = np.linspace(-4, 4, 41)
CURVE = 60  # points of a curve
PUBLISHED = "density=0.001,values=fp32,granularity=model"
METHODS = {
    "gaussiank": f"gaussiank:{PUBLISHED}",
    "gaussiank, at most k": f"gaussiank:{PUBLISHED},select=(gaussiank:finish=exact)",
    "topk": f"topk:{PUBLISHED}",
    "randk": f"randk:{PUBLISHED}",
    "dense": "dense:granularity=model",
}


def look(seen: Look) -> dict[str, Any]:
    """Of rank 0 alone; the others are like it."""
    if seen.rank:
        return {}
    vector = (seen.gradient + seen.owed).astype(np.float64)
    deviation = vector.std()
    counts, _ = np.histogram(vector / deviation, EDGES)
    squares = np.sort(vector**2)[::-1]
    kept = np.cumsum(squares) / squares.sum()
    size = len(vector)
    ordered = squares / squares[0]
    return {
        "step": seen.step,
        "histogram": (counts / size).tolist(),
        "left": [float(1 - kept[max(1, int(share * size)) - 1]) for share in SHARES],
        "curve": ordered[np.linspace(0, size - 1, CURVE).astype(int)].tolist(),
        "below_line": bool(np.all(ordered <= 1 - np.arange(size) / size + 1e-9)),
        "kurtosis": float(np.mean((vector - vector.mean()) ** 4) / deviation**4),
    }


def shape(model: str, seed: int, steps: int) -> dict[str, Any]:
    optimizer, rate = RECIPES[model]
    training = Training(f"topk:{PUBLISHED}", 4, steps, optimizer, rate)
    outcome = train(make(model, seed), training, look, steps // 4 - 1)
    return {"looks": outcome.watched[0]}


def sent_over_k(seen: Look) -> float:
    return seen.stats.selected / max(1, seen.stats.budget) if seen.rank == 0 else 0.0


def counts(model: str, method: str, seed: int, steps: int, ranks: int) -> dict[str, Any]:
    optimizer, rate = RECIPES[model]
    spec = METHODS[method]
    if method != "dense":
        spec += f",warmup_steps={steps // 10},ramp_steps={steps // 10}"
    training = Training(spec, ranks, steps, optimizer, rate)
    outcome = train(make(model, seed), training, sent_over_k)
    return {"counts": outcome.watched[0], "score": outcome.score}


def main() -> None:
    claim = Claim("gaussian", __doc__ or "")
    models = MODELS[:1] if claim.quick else MODELS
    seeds, steps, ranks = (1, 60, 4) if claim.quick else (3, 160, 16)
    shapes = {
        (model, seed): Run(
            f"shape, {model}, seed {seed}",
            lambda model=model, seed=seed: shape(model, seed, steps),
        )
        for seed in range(seeds)
        for model in models
    }
    trained = {
        (model, method, seed): Run(
            f"{method}, {model}, {ranks} ranks, seed {seed}",
            lambda model=model, method=method, seed=seed: counts(model, method, seed, steps, ranks),
        )
        for seed in range(seeds)
        for model in models[:2]
        for method in METHODS
    }
    found = claim.measure([*shapes.values(), *trained.values()])
    show_shapes(claim, {key: found[run.name] for key, run in shapes.items() if run.name in found})
    results = {key: found[run.name] for key, run in trained.items() if run.name in found}
    rows = []
    for model in models[:2]:
        lines = []
        for method in METHODS:
            mine = [row for (*what, _), row in results.items() if what == [model, method]]
            if not mine:
                continue
            cells = ["-", "-"]
            if method != "dense":
                late = [statistics.fmean(row["counts"][steps // 2 :]) for row in mine]
                most = [max(row["counts"][steps // 2 :]) for row in mine]
                cells = [spread(late, ".2f"), f"{max(most):.1f}"]
                lines.append((method, list(enumerate(mine[0]["counts"]))))
            losses = [row["score"]["loss"] for row in mine]
            right = [100 * row["score"]["accuracy"] for row in mine]
            rows.append([f"{model}, {method}", *cells, spread(losses), spread(right, ".1f")])
        title = f"Entries sent over k, {model}, {ranks} ranks, 0.1 %"
        claim.picture(Figure(title, "step", "sent / k", lines), f"counts_{model}")
    heads = [f"{ranks} ranks, 0.1 %", "sent / k", "most in a step", "loss", "accuracy, %"]
    claim.table(heads, rows, "counts")


def show_shapes(claim: Claim, shown: dict[Any, Any]) -> None:
    models = list(dict.fromkeys(model for model, _ in shown))
    rows = []
    for model in models:
        last = [row["looks"][-1] for (m, _), row in shown.items() if m == model]
        every = [look for (m, _), row in shown.items() if m == model for look in row["looks"]]
        cells = [spread([each["left"][n] for each in last], ".3f") for n in (0, 2, 4)]
        below = sum(each["below_line"] for each in every)
        rows.append([model, *cells, spread([each["kurtosis"] for each in last], ".0f"),
                     f"{below} of {len(every)}"])  # fmt: skip
    rows.append(["1 - k/d", "0.999", "0.990", "0.900", "", ""])
    rows.append(["(1 - k/d)²", "0.998", "0.980", "0.810", "3 (normal)", ""])
    heads = ["left by Top-K", "k/d = 0.001", "0.01", "0.1", "kurtosis", "looks below the line"]
    claim.table(heads, rows, "left")
    firsts = {model: shown[model, 0]["looks"] for model in models if (model, 0) in shown}
    middles = [float(each) for each in (EDGES[1:] + EDGES[:-1]) / 2]
    width = EDGES[1] - EDGES[0]
    normal = [float(np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi) * width) for x in middles]
    for model, looks in firsts.items():
        lines = [
            (f"step {each['step']}", list(zip(middles, each["histogram"], strict=True)))
            for each in looks
        ]
        lines.append(("normal", list(zip(middles, normal, strict=True))))
        title = f"owed + gradient through training: {model}"
        figure = Figure(title, "deviations", "share of the entries", lines, y_scale="log")
        claim.picture(figure, f"shape_{model}")
    lines = [
        (model, [(n / (CURVE - 1), value) for n, value in enumerate(looks[-1]["curve"])])
        for model, looks in firsts.items()
    ]
    straight = [n / (CURVE - 1) for n in range(CURVE - 1)]
    lines.append(("straight line", [(x, 1 - x) for x in straight]))
    title = "Ordered squares over the largest, which the theorem wants below the line"
    claim.picture(Figure(title, "place / d", "square / largest", lines, y_scale="log"), "curve")
    lines = [(m, list(zip(SHARES, each[-1]["left"], strict=True))) for m, each in firsts.items()]
    lines.append(("1 - k/d", [(each, 1 - each) for each in SHARES]))
    lines.append(("(1 - k/d)²", [(each, (1 - each) ** 2) for each in SHARES]))
    title = "What Top-K leaves of owed + gradient"
    claim.picture(Figure(title, "k/d", "|left|² / |all|²", lines, "log"), "left")


if __name__ == "__main__":
    main()
