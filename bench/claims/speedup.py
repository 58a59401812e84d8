"""speedup: does the gradient norm fall with the number of ranks, as linear speed-up says?

Three problems whose ranks hold different data and see noisy gradients: a quadratic, the same with
noise that cancels between ranks, and logistic regression on the digits, sorted so that a rank knows
few of them. The step size is constant, so the
squared gradient norm settles where noise holds it. With linear speed-up that is in proportion to
1/N. Dense SGD, ARC-Top-K with EF21M and local Top-K with EF21M; 20 %, values in fp32.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from claim import Claim, Run, spread
from figure import Figure

from topreduce import Communicator, Layout, Reducer, run_ranks
from topreduce.lab.tasks.digits import load_digits

Floats = npt.NDArray[np.float64]
METHODS = {
    "dense": "dense",
    "ARC-Top-K, EF21M": "arc_topk:density=0.2,sketch=4,values=fp32,feedback=(ef21m:eta=0.2),"
    "granularity=model",
    "Top-K, EF21M": "topk:density=0.2,values=fp32,feedback=(ef21m:eta=0.2),granularity=model",
}


class Objective(Protocol):
    """A sum over ranks of functions that only they know."""

    shape: tuple[int, int]
    rate: float

    def noisy_gradient(
        self, x: Floats, rank: int, step: int, rng: np.random.Generator
    ) -> Floats: ...
    def gradient(self, x: Floats) -> Floats:
        """Of the mean over all ranks, exactly."""


class Quadratic:
    """1/2 (x - b_i)' A (x - b_i); the b_i lie ten times as far apart as their mean from zero."""

    shape = (50, 20)
    rate = 0.1
    NOISE = 1.0

    def __init__(self, ranks: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        size = self.shape[0] * self.shape[1]
        self._curvature = rng.uniform(0.2, 1.0, size)
        apart = rng.normal(size=(ranks, size)) * 10
        self._targets = rng.normal(size=size) + apart - apart.mean(axis=0)
        self._mean = self._targets.mean(axis=0)

    def noisy_gradient(self, x: Floats, rank: int, step: int, rng: np.random.Generator) -> Floats:
        noise: Floats = self.NOISE * rng.normal(size=x.size)
        return self._curvature * (x - self._targets[rank]) + noise

    def gradient(self, x: Floats) -> Floats:
        return self._curvature * (x - self._mean)


class Cancelling(Quadratic):
    """The same, and noise that two halves of the ranks have with opposite signs.

    It is the same for all ranks of a half, lies in three quarters of the rows, and is ten times as
    large: a rank alone sees little else, the mean nothing of it.
    """

    LOUD = 10.0

    def __init__(self, ranks: int, seed: int) -> None:
        super().__init__(ranks, seed)
        self._ranks, self._seed = ranks, seed

    def noisy_gradient(self, x: Floats, rank: int, step: int, rng: np.random.Generator) -> Floats:
        slope = super().noisy_gradient(x, rank, step, rng)
        if self._ranks % 2 == 0:
            loud = 3 * x.size // 4
            sign = self.LOUD if rank < self._ranks // 2 else -self.LOUD
            slope[:loud] += sign * np.random.default_rng([self._seed, step, 2]).normal(size=loud)
        return slope


class Logistic:
    """Which digit is it? With 64 inputs and a constant, L2 of 0.01; batches of 4."""

    shape = (65, 10)
    rate = 0.3
    BATCH, MOST_RANKS, DECAY = 4, 64, 0.01

    def __init__(self, ranks: int, seed: int) -> None:
        digits = load_digits()
        pictures = digits.training_pictures.flatten(1).double()
        order = torch.argsort(digits.training_names, stable=True)
        order = order[: len(order) // self.MOST_RANKS * self.MOST_RANKS]
        inputs = torch.cat([pictures, torch.ones(len(pictures), 1)], dim=1)[order].numpy()
        wanted = np.eye(10)[digits.training_names[order].numpy()]
        self._all = (inputs, wanted)
        self._parts = list(zip(np.split(inputs, ranks), np.split(wanted, ranks), strict=True))

    def _slope(self, x: Floats, inputs: Floats, wanted: Floats) -> Floats:
        weights = x.reshape(self.shape)
        logits = inputs @ weights
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        slope: Floats = inputs.T @ (shares - wanted) / len(inputs) + self.DECAY * weights
        return slope.ravel()

    def noisy_gradient(self, x: Floats, rank: int, step: int, rng: np.random.Generator) -> Floats:
        inputs, wanted = self._parts[rank]
        chosen = rng.integers(len(inputs), size=self.BATCH)
        return self._slope(x, inputs[chosen], wanted[chosen])

    def gradient(self, x: Floats) -> Floats:
        return self._slope(x, *self._all)


OBJECTIVES: dict[str, Callable[[int, int], Objective]] = {
    "quadratic": Quadratic,
    "cancelling": Cancelling,
    "logistic": Logistic,
}


@dataclass(frozen=True)
class Setting:
    objective: str
    method: str
    ranks: int
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.objective}, {self.method}, {self.ranks} ranks, seed {self.seed}"


def gradient_norm(setting: Setting) -> float:
    """The squared norm of the true gradient, over the last third of the steps."""
    objective = OBJECTIVES[setting.objective](setting.ranks, setting.seed)
    layout = Layout([("x", objective.shape)])

    def body(comm: Communicator) -> float:
        rng = np.random.default_rng([setting.seed, comm.rank, 1])
        reducer = Reducer(layout, METHODS[setting.method], seed=setting.seed)
        x = np.zeros(layout.size)
        norms = []
        for step in range(setting.steps):
            flat = objective.noisy_gradient(x, comm.rank, step, rng).astype(np.float32)
            reducer.begin(comm)
            reducer.add([0], flat)
            reducer.finish()
            x -= objective.rate * flat
            if comm.rank == 0 and step >= 2 * setting.steps // 3:
                slope = objective.gradient(x)
                norms.append(float(slope @ slope))
        return statistics.fmean(norms) if norms else 0.0

    return run_ranks(setting.ranks, body)[0]


def settings(
    objectives: Sequence[str], ranks: Sequence[int], seeds: int, steps: int
) -> list[Setting]:
    return [
        Setting(objective, method, count, seed, steps)
        for objective in objectives
        for count in ranks
        for method in METHODS
        for seed in range(seeds)
    ]


def main() -> None:
    claim = Claim("speedup", __doc__ or "")
    ranks = [1, 4, 8] if claim.quick else [1, 2, 4, 8, 16, 32, 64]
    seeds = 1 if claim.quick else 3
    asked = settings(list(OBJECTIVES), ranks, seeds, 300)
    found = claim.measure(
        [Run(each.name, lambda each=each: {"norm": gradient_norm(each)}) for each in asked]
    )
    for objective in OBJECTIVES:
        rows, lines = [], []
        for method in METHODS:
            by_ranks = {
                count: [
                    found[each.name]["norm"]
                    for each in asked
                    if (each.objective, each.method, each.ranks) == (objective, method, count)
                    and each.name in found
                ]
                for count in ranks
            }
            shown = {count: values for count, values in by_ranks.items() if values}
            lines.append((method, [(n, statistics.fmean(each)) for n, each in shown.items()]))
            cells = [spread(shown[n], ".3g") if n in shown else "-" for n in (1, 4, 16, 64)]
            falls = statistics.fmean(shown[ranks[0]]) / statistics.fmean(shown[ranks[-1]])
            rows.append([method, *cells, f"{falls:.1f}"])
        first = lines[0][1][0][1]
        lines.append(("1/N", [(n, first / n) for n in ranks]))
        claim.table(["", "N = 1", "4", "16", "64", f"1 over {ranks[-1]}"], rows, objective)
        title = f"Squared gradient norm against the number of ranks: {objective}"
        claim.picture(Figure(title, "ranks", "|gradient|²", lines, "log", "log"), objective)


if __name__ == "__main__":
    main()
