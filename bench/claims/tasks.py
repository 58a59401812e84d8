"""tasks: small trainings of the kinds that the papers used; accuracy or perplexity.

Gaussian-K: an FNN of 784-200-200-10 and LeNet-5 on MNIST, a residual network, an LSTM. Ok-Topk and
ARC-Top-K: masked-language pre-training of a Transformer on lines of reviews, and its fine-tuning
for sentiment; a LLaMA-like model on subwords of a dictionary. 4 ranks; methods as published at 1 %,
ARC-Top-K at 20 %; the first tenth of the steps dense. bench/claims/data.py fetches the data.
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from claim import Claim, Run, spread
from data import MASK, NONE, VOCABULARY, Labelled, dictionary, mnist, reviews
from figure import Figure
from problems import make
from torch import Tensor, nn
from training import Problem, Training, train

from topreduce.lab.tasks.digits import load_digits
from topreduce.lab.tasks.models import next_id_loss, seeded
from topreduce.lab.tasks.resnet import ResNet
from topreduce.lab.tasks.text import mix_keys

RANKS = 4
METHODS = {
    "dense": "dense:granularity=model",
    "topk 1 %": "topk:density=0.01,values=fp32,granularity=model",
    "ok_topk 1 %": "ok_topk:density=0.01,values=fp32,granularity=model",
    "gaussiank 1 %": "gaussiank:density=0.01,values=fp32,granularity=model",
    "randk 1 %": "randk:density=0.01,values=fp32,granularity=model",
    "arc_topk 20 %": "arc_topk:density=0.2,values=fp32,granularity=model",
    "topk 1 %, ours": "topk:density=0.01",
}


def drawn(seed: int, rank: int, step: int, most: int, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(mix_keys(seed, rank, step))
    return torch.randint(most, (batch,), generator=generator)


# ---- which kind is it? --------------------------------------------------------------------------


class Sorting:
    """Accuracy on data that is kept back."""

    def __init__(self, model: nn.Module, data: Labelled, seed: int, batch: int) -> None:
        self.model, self._data, self._seed, self._batch = model, data, seed, batch

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        inputs, kinds = self._data.training
        chosen = drawn(self._seed, rank, step, len(kinds), self._batch)
        return F.cross_entropy(model(inputs[chosen]), kinds[chosen])

    @torch.no_grad()
    def score(self, model: nn.Module) -> dict[str, float]:
        inputs, kinds = self._data.validation
        found = torch.cat([model(part).argmax(dim=1) for part in inputs.split(500)])
        return {"accuracy": 100 * (found == kinds).float().mean().item()}


def fnn() -> nn.Module:
    layers = [nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def small_digits() -> Labelled:
    digits = load_digits()
    return Labelled(
        (digits.training_pictures, digits.training_names),
        (digits.validation_pictures, digits.validation_names),
    )


# ---- words that are hidden, and whether a line is kind ------------------------------------------


class Encoder(nn.Module):
    """Words and places, two layers that look both ways; logits of words, or of the line."""

    def __init__(self, words: int = 4000, width: int = 64, longest: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=NONE)
        self.places = nn.Parameter(0.02 * torch.randn(longest, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 2)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        seen = self.words(ids) + self.places[: ids.shape[1]]
        for layer in self.layers:
            seen = layer(seen, src_key_padding_mask=ids == NONE)
        normed: Tensor = self.norm(seen)
        return normed

    def hidden_words(self, ids: Tensor) -> Tensor:
        return self.forward(ids) @ self.words.weight.T

    def kind(self, ids: Tensor) -> Tensor:
        there = (ids != NONE).float().unsqueeze(2)
        mean = (self.forward(ids) * there).sum(dim=1) / there.sum(dim=1).clamp(min=1)
        logits: Tensor = self.head(mean)
        return logits


class Hiding:
    """Every seventh word is hidden: which one was it? Perplexity."""

    def __init__(self, model: Encoder, seed: int, batch: int) -> None:
        self.model, self._seed, self._batch = model, seed, batch
        self._data = reviews()

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        lines = self._data.training[0]
        chosen = lines[drawn(self._seed, rank, step, len(lines), self._batch)]
        generator = torch.Generator().manual_seed(mix_keys(self._seed + 1000, rank, step))
        return hidden_loss(model, chosen, torch.rand(chosen.shape, generator=generator) < 1 / 7)

    @torch.no_grad()
    def score(self, model: nn.Module) -> dict[str, float]:
        lines = self._data.validation[0][:512]
        places = torch.rand(lines.shape, generator=torch.Generator().manual_seed(1)) < 1 / 7
        return {"perplexity": math.exp(hidden_loss(model, lines, places).item())}


def hidden_loss(model: nn.Module, lines: Tensor, places: Tensor) -> Tensor:
    assert isinstance(model, Encoder)
    places = places & (lines != NONE)
    places[:, 0] |= ~places.any()  # at least one
    logits = model.hidden_words(lines.masked_fill(places, MASK))
    return F.cross_entropy(logits[places], lines[places])


class Judging(Sorting):
    """Fine-tuning, from weights that were trained densely."""

    def __init__(self, seed: int, batch: int) -> None:
        model = Encoder()
        model.load_state_dict(pretrained(seed))
        super().__init__(model, reviews(), seed, batch)

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        assert isinstance(model, Encoder)
        inputs, kinds = self._data.training
        chosen = drawn(self._seed, rank, step, len(kinds), self._batch)
        return F.cross_entropy(model.kind(inputs[chosen]), kinds[chosen])

    @torch.no_grad()
    def score(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Encoder)
        inputs, kinds = self._data.validation
        found = model.kind(inputs).argmax(dim=1)
        return {"accuracy": 100 * (found == kinds).float().mean().item()}


@functools.cache
def pretrained(seed: int, steps: int = 300) -> dict[str, Tensor]:
    problem = Hiding(seeded(seed, Encoder), seed, 32)
    optimizer = torch.optim.AdamW(problem.model.parameters(), lr=2e-3)
    for step in range(steps):
        optimizer.zero_grad()
        problem.loss(problem.model, 0, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return problem.model.state_dict()


# ---- the next subword ---------------------------------------------------------------------------


class LlamaBlock(nn.Module):
    """RMS norms, attention with rotated places, a gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        hidden = 8 * width // 3
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, stream: Tensor, turn: Tensor) -> Tensor:
        batch, length, width = stream.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(self.attention_norm(stream)).view(split).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            rotated(query, turn), rotated(key, turn), value, is_causal=True
        )
        stream = stream + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.mlp_norm(stream)
        added: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return stream + added


def rotated(values: Tensor, turn: Tensor) -> Tensor:
    """Pairs of entries turned by angles that grow with their place."""
    left, right = values.chunk(2, dim=-1)
    return torch.cat(
        [left * turn.cos() - right * turn.sin(), left * turn.sin() + right * turn.cos()], dim=-1
    )


class Llama(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self._half = width // heads // 2

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], dtype=torch.float32)
        turn = places[:, None] * 10000 ** (-torch.arange(self._half) / self._half)
        stream = self.tokens(ids)
        for block in self.blocks:
            stream = block(stream, turn)
        logits: Tensor = self.head(self.norm(stream))
        return logits


class Writing:
    """Perplexity of the next subword."""

    def __init__(self, model: nn.Module, seed: int, batch: int = 4, context: int = 64) -> None:
        self.model, self._seed, self._batch, self._context = model, seed, batch, context
        self._text = dictionary()

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        inputs, targets = self._text.training_batch(
            self._batch, self._context, seed=self._seed, rank=rank, step=step
        )
        return next_id_loss(model, inputs, targets)

    @torch.no_grad()
    def score(self, model: nn.Module) -> dict[str, float]:
        batches = list(self._text.validation_batches(2, 64, self._context))
        losses = [next_id_loss(model, *batch).item() for batch in batches]
        return {"perplexity": math.exp(statistics.fmean(losses))}


# ---- all of them --------------------------------------------------------------------------------


def problem(task: str, seed: int) -> Problem:
    if task == "FNN, MNIST":
        return Sorting(seeded(seed, fnn), mnist(), seed, 32)
    if task == "LeNet-5, MNIST":
        return Sorting(seeded(seed, lenet), mnist(), seed, 16)
    if task == "ResNet, digits":
        return Sorting(seeded(seed, ResNet), small_digits(), seed, 8)
    if task == "Transformer, hidden words":
        return Hiding(seeded(seed, Encoder), seed, 8)
    if task == "Transformer, sentiment":
        return Judging(seed, 8)
    if task == "LLaMA-like, subwords":
        return Writing(seeded(seed, Llama), seed)
    return make("lstm", seed)()


# Optimizer, rate, steps; the Gaussian-K repository trains with momentum 0.9.
TASKS = {
    "FNN, MNIST": ("momentum", 0.05, 150),
    "LeNet-5, MNIST": ("momentum", 0.03, 150),
    "ResNet, digits": ("momentum", 0.05, 200),
    "LSTM, characters": ("adamw", 3e-3, 250),
    "Transformer, hidden words": ("adamw", 3e-3, 200),
    "Transformer, sentiment": ("adamw", 2e-3, 150),
    "LLaMA-like, subwords": ("adamw", 3e-3, 120),
}


def run(task: str, method: str, seed: int, steps: int) -> dict[str, Any]:
    optimizer, rate, _ = TASKS[task]
    spec = METHODS[method]
    if method != "dense":
        spec += f",warmup_steps={steps // 10}"
    outcome = train(lambda: problem(task, seed), Training(spec, RANKS, steps, optimizer, rate))
    score = outcome.score
    if set(score) == {"loss"}:
        score = {"perplexity": math.exp(score["loss"])}
    return score | {"bytes": outcome.bytes}


def main() -> None:
    claim = Claim("tasks", __doc__ or "")
    tasks = ["FNN, MNIST", "LLaMA-like, subwords"] if claim.quick else list(TASKS)
    seeds, share = (1, 0.2) if claim.quick else (3, 1.0)
    runs = {
        (task, method, seed): Run(
            f"{task}, {steps} steps, {method}, seed {seed}",
            lambda task=task, method=method, seed=seed, steps=steps: run(task, method, seed, steps),
        )
        for task, steps in {task: int(TASKS[task][2] * share) for task in tasks}.items()
        for seed in range(seeds)
        for method in METHODS
    }
    found = claim.measure(list(runs.values()))
    tasks = [
        task for task in tasks
        if all(each.name in found for key, each in runs.items() if key[0] == task)
    ]  # fmt: skip
    rows, lines = [], []
    for task in tasks:
        scores: dict[str, list[float]] = {}
        unit = ""
        for (name, method, _), each in runs.items():
            if name == task and each.name in found:
                row = found[each.name]
                unit = "accuracy" if "accuracy" in row else "perplexity"
                scores.setdefault(method, []).append(row[unit])
        cells = [spread(scores[each], ".1f") for each in METHODS]
        rows.append([f"{task}: {unit}{', %' * (unit == 'accuracy')}", *cells])
        means = [statistics.fmean(scores[each]) for each in METHODS]
        ratios = [mean / means[0] if unit == "accuracy" else means[0] / mean for mean in means]
        lines.append((task, [(float(place), ratio) for place, ratio in enumerate(ratios)]))
    claim.table(["", *METHODS], rows)
    names = ", ".join(f"{place}: {method}" for place, method in enumerate(METHODS))
    title = "Accuracy over that of dense training; perplexity of dense over that of the method"
    claim.picture(Figure(title, names, "share of dense", lines))


if __name__ == "__main__":
    main()
