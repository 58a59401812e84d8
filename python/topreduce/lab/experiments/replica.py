"""One rank's replica: a task, a method, an optimizer, and a step of all three."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from topreduce.lab.experiments.methods import Method
from topreduce.lab.network.namespaces import ClusterError, bytes_through
from topreduce.lab.tasks.models import Task, Workload, make_task

STEPS_OF_RISE = 20
_LARGEST_NORM = 1.0


@dataclass(frozen=True)
class Step:
    """What a step took on this rank; times on the machine's clock, which all ranks share."""

    start: float
    end: float
    loss: float
    bytes_sent: float  # at the network interface, including headers and acknowledgements
    stats: dict[str, Any]  # ours, if the method is ours


class Replica:
    """Trains one replica step by step."""

    def __init__(
        self,
        rank: int,
        workload: Workload,
        method: Method,
        optimizer: str | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Collective. `optimizer`: "adamw" or "sgd"; None takes those of the model."""
        self.rank = rank
        self.task: Task = make_task(workload)
        self.learning_rate = self.task.learning_rate if learning_rate is None else learning_rate
        self.attached = method.attach(self.task.model, workload.seed, workload.shards)
        self.steps = 0
        self._optimizer = _make_optimizer(self.task, optimizer or self.task.optimizer)

    def step(self, share: float = 1.0) -> Step:
        """One step with this share of the learning rate, which rises over the first steps."""
        rate = self.learning_rate * share * min(1.0, (self.steps + 1) / STEPS_OF_RISE)
        sent = interface_bytes()
        start = time.monotonic()
        for parameter in self.task.model.parameters():
            parameter.grad = None
        loss = self.task.loss(self.attached.model, self.rank, self.steps)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            nn.utils.clip_grad_norm_(self.task.model.parameters(), _LARGEST_NORM)
            self._optimizer.step()
        self.attached.after_step()
        if loss.device.type != "cpu":
            torch.accelerator.synchronize()
        end = time.monotonic()
        self.steps += 1
        sent = interface_bytes() - sent
        return Step(start, end, loss.item(), sent, self.attached.stats())

    def validation_loss(self) -> float:
        """Over the held-out data; every rank looks at a part of it. Collective."""
        ranks = dist.get_world_size()
        losses = torch.tensor(self.task.validation_loss(self.rank, ranks))
        dist.all_reduce(losses)
        return losses.item() / ranks

    def close(self) -> None:
        """Collective."""
        self.attached.close()


def interface_bytes() -> float:
    """Bytes sent by the host at the interface that Gloo uses; a rank's share of a loopback one."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    with contextlib.suppress(OSError, ClusterError):
        sent, _ = bytes_through(interface)
        return sent / dist.get_world_size() if interface.startswith("lo") else sent
    return 0.0


def _make_optimizer(task: Task, name: str) -> torch.optim.Optimizer | None:
    parameters = task.model.parameters()
    if name == "adamw":
        return torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    if name == "sgd":
        return torch.optim.SGD(parameters, momentum=0.9)
    return None
