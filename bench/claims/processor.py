"""What a step takes of a processor where nothing is sent: every process is a group of its own.

As many processes run at once as a race has hosts, and begin their steps together: they share cores
and caches as they do there.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import topreduce.torch
from topreduce.lab.experiments.launch import launch
from topreduce.lab.experiments.methods import OURS, Method
from topreduce.lab.experiments.race import WARM_UP_STEPS, begin_together
from topreduce.lab.tasks.models import Workload, make_task

PARTS = ("forward", "backward", "after")  # until the loss, the last gradient, the end
STEPS = 2  # of a method before the next one's turn
Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    workload: Workload
    methods: Sequence[str]  # "noop", or ours
    rounds: int


def processor_seconds(processes: int, options: Options) -> Row:
    """By method: what each part of a step takes of a processor, and how long the whole step takes.

    Medians of the steps of a process, means over the processes.
    """
    found = launch(_process, processes, options)
    return {
        label: {
            name: statistics.fmean(
                statistics.median(step[name] for step in process[label]) for process in found
            )
            for name in (*PARTS, "seconds")
        }
        for label in options.methods
    }


def _process(
    rank: int, world_size: int, options: Options, report: Callable[[object], None]
) -> dict[str, list[Row]]:
    torch.set_num_threads(1)
    group, _ = dist.new_subgroups(1)
    lone = [_Alone(label, options.workload, group) for label in options.methods]
    for number in range(options.rounds + 1):
        for each in lone:
            for _ in range(STEPS if number else WARM_UP_STEPS):
                begin_together()
                each.step(rank)
            dist.barrier()
    for each in lone:
        each.close()
    return {each.label: each.steps[WARM_UP_STEPS:] for each in lone}


class _Alone:
    """A method at work in a group of one."""

    def __init__(self, label: str, workload: Workload, group: dist.ProcessGroup) -> None:
        self.label, self.steps = label, list[Row]()
        self._task = make_task(workload)
        self._model = DistributedDataParallel(self._task.model, process_group=group)
        self._sync: topreduce.torch.Sync | None = None
        if label == "noop":
            self._model.register_comm_hook(None, noop_hook)
        else:
            spec = Method(label, label).steady().spec.removeprefix(OURS)
            self._sync = topreduce.torch.attach(self._model, spec, seed=workload.seed)
        self._last_gradient = 0.0
        first, *_ = self._task.model.parameters()  # backwards it is the last
        first.register_hook(self._see_last_gradient)

    def _see_last_gradient(self, gradient: Tensor) -> None:
        self._last_gradient = time.process_time()

    def step(self, rank: int) -> None:
        started, before = time.perf_counter(), time.process_time()
        for parameter in self._task.model.parameters():
            parameter.grad = None
        loss = self._task.loss(self._model, rank, len(self.steps))
        forward = time.process_time()
        loss.backward()
        end, seconds = time.process_time(), time.perf_counter() - started
        marks = (before, forward, self._last_gradient, end)
        taken = (later - mark for mark, later in itertools.pairwise(marks))
        self.steps.append({**dict(zip(PARTS, taken, strict=True)), "seconds": seconds})

    def close(self) -> None:
        if self._sync is not None:
            self._sync.detach()
