"""Small models on the data that comes with the lab, each trained in seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topreduce.lab.tasks.digits import load_digits
from topreduce.lab.tasks.gpt import GPT, GPTConfig
from topreduce.lab.tasks.models import LSTM, next_id_loss, seeded
from topreduce.lab.tasks.text import load_text, mix_keys

CONTEXT, BATCH = 64, 4


class Writing:
    """Characters of a text; with `ranks` every rank has a stretch of it for itself."""

    def __init__(self, model: nn.Module, seed: int, ranks: int = 0) -> None:
        self.model, self._seed, self._ranks = model, seed, ranks
        self._text = load_text()

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        if not self._ranks:
            inputs, targets = self._text.training_batch(
                BATCH, CONTEXT, seed=self._seed, rank=rank, step=step
            )
            return next_id_loss(model, inputs, targets)
        part = self._text.training.tensor_split(self._ranks)[rank]
        generator = torch.Generator().manual_seed(mix_keys(self._seed, rank, step))
        starts = torch.randint(len(part) - CONTEXT, (BATCH,), generator=generator)
        windows = part[starts[:, None] + torch.arange(CONTEXT + 1)]
        return next_id_loss(model, windows[:, :-1], windows[:, 1:])

    @torch.no_grad()
    def score(self, model: nn.Module) -> dict[str, float]:
        batches = list(self._text.validation_batches(2, 64, CONTEXT))
        losses = [next_id_loss(model, *batch).item() for batch in batches]
        return {"loss": sum(losses) / len(losses)}


class Reading:
    """Digits; with `ranks` every rank has its own share of them, sorted by digit."""

    def __init__(self, model: nn.Module, seed: int, ranks: int = 0) -> None:
        self.model, self._seed, self._ranks = model, seed, ranks
        self._digits = load_digits()
        self._order = torch.argsort(self._digits.training_names, stable=True)

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        digits, batch = self._digits, 8
        if not self._ranks:
            pictures, names = digits.training_batch(batch, seed=self._seed, rank=rank, step=step)
        else:
            part = self._order.tensor_split(self._ranks)[rank]
            generator = torch.Generator().manual_seed(mix_keys(self._seed, rank, step))
            chosen = part[torch.randint(len(part), (batch,), generator=generator)]
            pictures, names = digits.training_pictures[chosen], digits.training_names[chosen]
        return F.cross_entropy(model(pictures), names)

    @torch.no_grad()
    def score(self, model: nn.Module) -> dict[str, float]:
        logits = model(self._digits.validation_pictures)
        names = self._digits.validation_names
        right = (logits.argmax(dim=1) == names).float().mean().item()
        return {"loss": F.cross_entropy(logits, names).item(), "accuracy": right}


def fnn() -> nn.Module:
    """Two hidden layers of 200, as the FNN-3 of the Gaussian-K repository."""
    layers = [nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 96),
        nn.ReLU(),
        nn.Linear(96, 10),
    )


def gpt(seed: int, width: int = 64) -> nn.Module:
    vocabulary = len(load_text().characters)
    return GPT(GPTConfig(2, width, 4, CONTEXT, vocabulary), seed=seed)


def lstm() -> nn.Module:
    return LSTM(len(load_text().characters), width=96)


def make(name: str, seed: int, ranks: int = 0) -> Callable[[], Writing | Reading]:
    """By name: gpt, lstm, fnn or cnn; `ranks`: their data differ."""
    if name == "gpt":
        return lambda: Writing(gpt(seed), seed, ranks)
    if name == "lstm":
        return lambda: Writing(seeded(seed, lstm), seed, ranks)
    return functools.partial(_reading, {"fnn": fnn, "cnn": cnn}[name], seed, ranks)


def _reading(model: Callable[[], nn.Module], seed: int, ranks: int) -> Reading:
    return Reading(seeded(seed, model), seed, ranks)


# Optimizer and rate that suit each of them.
RECIPES = {
    "gpt": ("adamw", 3e-3),
    "lstm": ("adamw", 3e-3),
    "fnn": ("momentum", 0.05),
    "cnn": ("momentum", 0.02),
}
