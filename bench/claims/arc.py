"""arc: ARC-Top-K where it is meant to be, beside Top-K, Rand-K and dense training.

A small GPT on characters, 4 ranks, the first tenth of the steps dense. From one centre (20 %,
sketch 4, residual, AdamW) one factor at a time: density, sketch, feedback, optimizer, data. As
published: each tensor its own rows, the whole model at once, fp32. Shown is how much higher the
validation loss ends than in dense training with the same seed, and what a rank sends in a step.

Then how much of the energy of the ranks' mean (owed + gradient) arrives, tensor by tensor, and the
time of a step on a simulated network.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from claim import Claim, Run, spread
from contraction import sample_vectors
from figure import Figure
from network import means, simulate
from problems import RECIPES, make
from training import Floats, Training, compressed, layout_of, relative_error, train

from topreduce import Layout

RANKS = 4
RATES = {"adamw": 3e-3, "momentum": 0.1, "sgd": 0.5}
DENSITIES = (0.05, 0.1, 0.2, 0.3)
SKETCHES = (1, 2, 4, 8, 16)
FEEDBACKS = ("residual", "ef21", "ef21m")
SPARSE = ("arc_topk", "topk", "randk")
EQUAL = 0.0  # density: as many bytes as arc_topk at 20 %


@dataclass(frozen=True)
class Variant:
    method: str
    density: float = 0.2
    sketch: int = 4
    feedback: str = "residual"
    optimizer: str = "adamw"
    ours: bool = False  # rows ranked over the model, 4-bit values
    skewed: bool = False
    model: str = "gpt"

    @property
    def name(self) -> str:
        words = [self.model, self.method]
        if self.method != "dense":
            words += [f"{self.density:.0%}" if self.density else "equal bytes", self.feedback]
        if self.method == "arc_topk":
            words.append(f"sketch {self.sketch}")
        words.append(self.optimizer)
        return ", ".join(words + ["ours"] * self.ours + ["ranks differ"] * self.skewed)

    @property
    def dense(self) -> Variant:
        return Variant("dense", optimizer=self.optimizer, skewed=self.skewed, model=self.model)

    def spec(self, warmup: int) -> str:
        if self.method == "dense":
            return "dense:granularity=model"
        words = [f"density={self.density}", "granularity=model", f"feedback={self.feedback}"]
        words += [f"warmup_steps={warmup}", f"values={'auto' if self.ours else 'fp32'}"]
        if self.method == "arc_topk":
            words += [f"sketch={self.sketch}"] + ["ranked=model"] * self.ours
        return f"{self.method}:{','.join(words)}"


EQUAL_BYTES = (Variant("topk", EQUAL), Variant("randk", EQUAL))


def variants() -> Iterator[Variant]:
    """What the verdicts rest on comes first."""
    yield from (Variant("dense", optimizer=each) for each in RATES)
    yield from (Variant(method, each) for each in DENSITIES for method in SPARSE)
    yield from EQUAL_BYTES
    for optimizer in RATES:
        for feedback in FEEDBACKS:
            for method in ("arc_topk", "topk"):
                yield Variant(method, feedback=feedback, optimizer=optimizer)
    yield from (Variant("arc_topk", sketch=each) for each in SKETCHES)
    yield from (Variant(method, ours=True) for method in ("arc_topk", "topk"))
    yield Variant("dense", skewed=True)
    yield from (Variant(method, skewed=True) for method in SPARSE)
    for skewed in (False, True):
        some = Variant("dense", optimizer="momentum", skewed=skewed, model="fnn")
        yield some
        for density in (0.05, 0.2):
            yield from (replace(some, method=method, density=density) for method in SPARSE)


def run(variant: Variant, seed: int, steps: int) -> dict[str, Any]:
    maker = make(variant.model, seed, RANKS if variant.skewed else 0)
    if variant.density == EQUAL:
        layout = layout_of(maker().model)
        variant = replace(variant, density=equal_density(variant.method, layout))
    rate = RATES[variant.optimizer] if variant.model == "gpt" else RECIPES[variant.model][1]
    training = Training(variant.spec(steps // 10), RANKS, steps, variant.optimizer, rate)
    outcome = train(maker, training)
    return outcome.score | {"bytes": outcome.bytes, "density": variant.density}


# ---- equal bytes ------------------------------------------------------------------------------


def sent(spec: str, layout: Layout) -> int:
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(layout.size, dtype=np.float32) for _ in range(RANKS)]
    return compressed(inputs, layout, spec)[1]


def equal_density(method: str, layout: Layout, arc: str = "arc_topk:density=0.2") -> float:
    """At which the method sends as much as ARC-Top-K does, within 1 %."""
    wanted = sent(f"{arc},values=fp32", layout)
    low, high = 0.001, 1.0
    while high - low > 0.005 * low:
        middle = (low + high) / 2
        if sent(f"{method}:density={middle},values=fp32", layout) < wanted:
            low = middle
        else:
            high = middle
    return round((low + high) / 2, 4)


# ---- the energy that arrives ------------------------------------------------------------------

# As a spec, and whether every tensor is exchanged by itself.
ENERGY = {
    "arc_topk, by tensor": ("arc_topk", True),
    "topk, by tensor": ("topk", True),
    "arc_topk, by model": ("arc_topk:ranked=model", False),
    "topk, by model": ("topk", False),
}


def kind_of(name: str) -> str:
    """Of a parameter with rows: its name without blocks and their numbers."""
    parts = [part for part in name.split(".") if part not in ("blocks", "weight")]
    return next((part for part in parts if not part.isdigit()), f"layer {parts[-1]}")


def energy(model: str, skewed: bool, seed: int, steps: int) -> dict[str, Any]:
    """Shares of |mean|^2 that arrive, by density and method: per kind of tensor, and of all."""
    vectors = sample_vectors(model, seed, skewed, steps)
    layout = layout_of(make(model, seed)().model)
    sizes = [int(np.prod(shape)) for shape in layout.shapes]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    found: dict[str, dict[str, dict[str, float]]] = {}
    densities = {"5%": 0.05, "20%": 0.2}
    for words, density in densities.items():
        for label, (method, apart) in ENERGY.items():
            shares: dict[str, list[float]] = {}
            for number, inputs in enumerate(vectors):
                mean = np.mean(np.asarray(inputs, dtype=np.float64), axis=0).astype(np.float32)
                spec = f"{method}{',' if ':' in method else ':'}density={density},values=fp32"
                out = arrived(inputs, layout, spec, apart, starts, number)
                shares.setdefault("all", []).append(1 - relative_error(out, mean))
                for tensor, name in enumerate(layout.names):
                    part = slice(starts[tensor], starts[tensor + 1])
                    if len(layout.shapes[tensor]) > 1 and mean[part].any():
                        share = 1 - relative_error(out[part], mean[part])
                        shares.setdefault(kind_of(name), []).append(share)
            means_of = {kind: statistics.fmean(each) for kind, each in shares.items()}
            found.setdefault(words, {})[label] = means_of
    return found


def arrived(
    inputs: list[Floats], layout: Layout, spec: str, apart: bool, starts: Any, seed: int
) -> Floats:
    if not apart:
        return compressed(inputs, layout, spec, seed)[0]
    parts = []
    for tensor, (name, shape) in enumerate(zip(layout.names, layout.shapes, strict=True)):
        some = [each[starts[tensor] : starts[tensor + 1]].copy() for each in inputs]
        parts.append(compressed(some, Layout([(name, tuple(shape))]), spec, seed)[0])
    return np.concatenate(parts)


# ---- the time of a step -----------------------------------------------------------------------

WIRES = {"100 Mb/s": 100e6, "200 Mb/s": 200e6, "500 Mb/s": 500e6, "1 Gb/s": 1e9}
STEPS = {
    "dense": "dense:granularity=bucket",
    "ARC 20 %, as published": "arc_topk:density=0.2,values=fp32,granularity=model",
    "ARC 20 %, in buckets": "arc_topk:density=0.2,values=fp32,granularity=bucket",
    "ARC 20 %, ours": "arc_topk:density=0.2,granularity=bucket",
    "Top-K 20 %, as published": "topk:density=0.2,values=fp32,granularity=model",
    "Rand-K 20 %": "randk:density=0.2,values=fp32,granularity=model",
}
COMPUTE = 0.08  # seconds: a quarter of a dense step at 1 Gb/s


def timed(spec: str, rate: float) -> dict[str, Any]:
    """5.2 M entries in rows of 2048, so that the sketch is short."""
    steps = simulate(
        spec=spec, ranks=RANKS, rate=rate, latency=50e-6, shapes="512x2048*5", compute=COMPUTE,
        steps=5, skip=2,
    )  # fmt: skip
    return {"seconds": means(steps)["seconds"]}


# ---- all of it --------------------------------------------------------------------------------


def main() -> None:
    claim = Claim("arc", __doc__ or "")
    seeds, steps = (1, 30) if claim.quick else (3, 120)
    trained = {
        (variant, seed): Run(
            f"{variant.name}, seed {seed}",
            lambda variant=variant, seed=seed: run(variant, seed, steps),
        )
        for seed in range(seeds)
        for variant in dict.fromkeys(variants())
    }
    shares = {
        (model, skewed, seed): Run(
            f"energy, {model}, {'ranks differ' if skewed else 'ranks alike'}, seed {seed}",
            lambda model=model, skewed=skewed, seed=seed: energy(model, skewed, seed, steps // 2),
        )
        for seed in range(seeds)
        for model in ("gpt", "fnn")
        for skewed in (False, True)
    }
    clocked = {
        (label, wire): Run(f"step, {label}, {wire}", lambda spec=spec, rate=rate: timed(spec, rate))
        for label, spec in STEPS.items()
        for wire, rate in WIRES.items()
    }
    found = claim.measure([*trained.values(), *shares.values(), *clocked.values()])
    rows_of = {key: found[each.name] for key, each in trained.items() if each.name in found}
    show_trained(claim, rows_of, steps)
    show_energy(claim, {k: found[each.name] for k, each in shares.items() if each.name in found})
    times = {k: found[each.name]["seconds"] for k, each in clocked.items() if each.name in found}
    rows = []
    for label in STEPS:
        cells = []
        for wire in WIRES:
            if (label, wire) in times and ("dense", wire) in times:
                saved = 1 - times[label, wire] / times["dense", wire]
                share = "" if label == "dense" else f" ({saved:.1%} less)"
                cells.append(f"{times[label, wire] * 1e3:.0f} ms{share}")
        rows.append([label, *cells])
    claim.table(["4 ranks, 5.2 M entries", *WIRES], rows, "steps")


def show_trained(claim: Claim, rows_of: dict[Any, Any], steps: int) -> None:
    def values(variant: Variant, what: str = "loss") -> list[float]:
        return [row[what] for (each, _), row in rows_of.items() if each == variant]

    def above(variant: Variant) -> list[float]:
        return [a - b for a, b in zip(values(variant), values(variant.dense), strict=False)]

    def cell(variant: Variant) -> str:
        excess = above(variant)
        return spread(excess, "+.3f") if excess else "-"

    def kilobytes(variant: Variant) -> str:
        some = values(variant, "bytes")
        return f"{some[0] / 1e3:.0f}" if some else "-"

    rows = [
        [method, *(f"{cell(each)}, {kilobytes(each)} kB" for each in
                   (Variant(method, density) for density in DENSITIES))]
        for method in SPARSE
    ]  # fmt: skip
    claim.table(["AdamW, residual", *(f"{each:.0%}" for each in DENSITIES)], rows, "density")
    rows = []
    for variant in (Variant("arc_topk"), *EQUAL_BYTES, Variant("dense")):
        density = values(variant, "density")
        named = "" if variant.method == "dense" else f" {density[0]:.1%}" if density else ""
        score = spread(values(variant)) if variant.method == "dense" else cell(variant)
        rows.append([f"{variant.method}{named}", score, kilobytes(variant)])
    claim.table(["", "loss above dense; dense: loss", "kB a step"], rows, "bytes")
    sketches = [Variant("arc_topk", sketch=each) for each in SKETCHES]
    cells = [f"{cell(each)}, {kilobytes(each)} kB" for each in sketches]
    claim.table(["sketch", *map(str, SKETCHES)], [["arc_topk 20 %", *cells]], "sketch")
    rows = []
    for optimizer in RATES:
        dense = spread(values(Variant("dense", optimizer=optimizer)))
        for method in ("arc_topk", "topk"):
            some = [Variant(method, feedback=each, optimizer=optimizer) for each in FEEDBACKS]
            rows.append([f"{method}, {optimizer}", dense, *map(cell, some)])
    claim.table(["20 %", "dense: loss", *FEEDBACKS], rows, "feedback")
    rows = []
    for model, optimizer in (("gpt", "adamw"), ("fnn", "momentum")):
        for density in (0.05, 0.2):
            for skewed in (False, True):
                some = [Variant(method, density, optimizer=optimizer, skewed=skewed, model=model)
                        for method in SPARSE]  # fmt: skip
                if not all(map(values, some)):
                    continue
                words = "differ" if skewed else "alike"
                dense = spread(values(some[0].dense))
                rows.append([f"{model}, {density:.0%}, data {words}", dense, *map(cell, some)])
    claim.table(["", "dense: loss", *SPARSE], rows, "data")
    rows = [
        [method, *(f"{cell(each)}, {kilobytes(each)} kB" for each in
                   (Variant(method), Variant(method, ours=True)))]
        for method in ("arc_topk", "topk")
    ]  # fmt: skip
    claim.table(["20 %", "as published", "ours"], rows, "ours")
    lines = [
        (method, [(d, statistics.fmean(above(Variant(method, d)))) for d in DENSITIES
                  if above(Variant(method, d))])
        for method in SPARSE
    ]  # fmt: skip
    title = f"Loss above dense training after {steps} steps, AdamW, residual, 3 seeds"
    claim.picture(Figure(title, "density", "validation loss above dense", lines))


def show_energy(claim: Claim, found: dict[Any, Any]) -> None:
    for model in ("gpt", "fnn"):
        rows = []
        some = [row for (m, _, _), row in found.items() if m == model]
        kinds = list(some[0]["20%"]["topk, by tensor"]) if some else []
        for density in ("5%", "20%"):
            for kind in kinds:
                cells = []
                for skewed in (False, True):
                    mine = [row for (m, s, _), row in found.items() if (m, s) == (model, skewed)]
                    for label in ENERGY:
                        shares = [row[density][label][kind] for row in mine]
                        cells.append(f"{statistics.fmean(shares):.2f}" if shares else "-")
                rows.append([f"{density}, {kind}", *cells])
        heads = [f"{label}, {words}" for words in ("alike", "differ") for label in ENERGY]
        claim.table([model, *heads], rows, f"energy {model}")


if __name__ == "__main__":
    main()
