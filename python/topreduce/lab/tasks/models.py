"""What is trained in the lab: a model, its data, its loss; all of it on one machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topreduce.lab.tasks.digits import load_digits
from topreduce.lab.tasks.gpt import GPT, PRESETS, preset
from topreduce.lab.tasks.own import OwnTask, own_maker
from topreduce.lab.tasks.resnet import ResNet
from topreduce.lab.tasks.text import Text, load_text
from topreduce.lab.tasks.waiting import Waiting

MODELS = (*PRESETS, "lstm", "resnet")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every rank computes in a step."""

    model: str = "gpt:1m"
    batch: int = 4  # examples per rank
    context: int = 64  # characters per example, where the data is text
    compute: float | None = None  # seconds to wait instead of computing
    seed: int = 0
    shards: int = 1  # ranks on a host, which share a replica; 1: every rank has its own
    device: str = "cpu"  # where models and data lie, such as cuda
    backend: str = "gloo"  # of the device's process group


class Task(Protocol):
    """A model with its data."""

    model: nn.Module
    learning_rate: float
    optimizer: str  # what suits it: "adamw" or "sgd"

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        """Of `model`, which may be this one wrapped, on the batch of this rank and step."""

    def validation_loss(self, part: int, parts: int) -> float:
        """Over one of several equal parts of the data that is kept back."""

    def sample(self, size: int) -> str:
        """Something that the model writes, if it can write."""


def check_model(name: str) -> None:
    """ValueError for a model that no rank could make."""
    if name not in MODELS:
        own_maker(name)


def check_device(device: str, backend: str, ranks: int) -> None:
    """ValueError for a device that is not here, or too few of them for this backend."""
    if device == "cpu":
        return
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != device:
        raise ValueError(f"--device {device}: torch finds {found or 'no accelerator'} here")
    there = torch.accelerator.device_count()
    if backend != "gloo" and there < ranks:
        raise ValueError(
            f"--backend {backend}: {ranks} ranks need a device each, and torch finds {there}; ask "
            "for fewer ranks, or leave --backend out: Gloo lets them share"
        )


def backends(workload: Workload) -> str:
    """For torch.distributed.init_process_group: of main memory, and of the device."""
    device = workload.device
    return "gloo" if device == "cpu" else f"cpu:gloo,{device}:{workload.backend}"


def make_task(workload: Workload) -> Task:
    """The same weights and data wherever the workload is the same."""
    if workload.compute is not None:
        real = make_task(replace(workload, compute=None)).model
        return Waiting([each.shape for each in real.parameters()], workload.compute, workload.seed)
    if workload.model not in MODELS:
        return OwnTask(seeded(workload.seed, own_maker(workload.model)))
    return _Digits(workload) if workload.model == "resnet" else _Writing(workload)


def next_id_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next id, in nats."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


# ---- text -----------------------------------------------------------------------------------


class LSTM(nn.Module):
    """Two layers over characters; ids in, logits of the next id out."""

    def __init__(self, vocabulary: int, width: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.tokens(ids))[0])
        return logits


class _Writing:
    """A GPT or an LSTM that learns to write."""

    VALIDATION_WINDOWS = 128
    optimizer = "adamw"

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.text = load_text()
        self.model: nn.Module = _language_model(workload, self.text).to(workload.device)
        self.learning_rate = 1e-3 if workload.model == "gpt:10m" else 3e-3

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        load = self.workload
        inputs, targets = self.text.training_batch(
            load.batch, load.context, seed=load.seed, rank=rank, step=step
        )
        return next_id_loss(model, inputs.to(load.device), targets.to(load.device))

    @torch.no_grad()
    def validation_loss(self, part: int, parts: int) -> float:
        each = max(1, self.VALIDATION_WINDOWS // parts)
        batches = list(self.text.validation_batches(parts, each, self.workload.context))
        return next_id_loss(self.model, *batches[part]).item()

    def sample(self, size: int) -> str:
        if not isinstance(self.model, GPT):
            return ""
        return self.text.decode(self.model.generate(size, self.workload.seed))


def _language_model(workload: Workload, text: Text) -> nn.Module:
    vocabulary = len(text.characters)
    if workload.model == "lstm":
        return seeded(workload.seed, lambda: LSTM(vocabulary))
    config = preset(workload.model, context=workload.context, vocabulary=vocabulary)
    return GPT(config, seed=workload.seed)


# ---- pictures -------------------------------------------------------------------------------


class _Digits:
    """A ResNet that learns to read digits."""

    optimizer = "sgd"
    learning_rate = 0.05

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.digits = load_digits()
        self.model: nn.Module = seeded(workload.seed, ResNet).to(workload.device)

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        load = self.workload
        pictures, names = self.digits.training_batch(
            load.batch, seed=load.seed, rank=rank, step=step
        )
        return F.cross_entropy(model(pictures.to(load.device)), names.to(load.device))

    @torch.no_grad()
    def validation_loss(self, part: int, parts: int) -> float:
        pictures = self.digits.validation_pictures.tensor_split(parts)[part]
        names = self.digits.validation_names.tensor_split(parts)[part]
        return F.cross_entropy(self.model(pictures), names).item()

    def sample(self, size: int) -> str:
        return ""


def seeded(seed: int, make: Callable[[], T]) -> T:
    """What `make` makes when torch draws from this seed; torch's own stream goes on as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
