"""Ranks as real processes over Gloo: started once, given many cases.

A case is a function of a test module. It runs in every rank at the same time; what it returns comes
back in rank order. A rank that raises, dies or hangs fails the test, and new processes are started
for the next one.
"""

import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

kept: list[dist.ProcessGroup] = []  # by this rank from case to case: torch caches its meshes
PRELOADED = [
    *("torch._dynamo", "torch.nn.parallel", "pytest", "topreduce.torch"),
    *("torch._inductor.compile_fx", "torch.distributed.checkpoint"),
]
NAIVE = "TOPREDUCE_TESTS_NAIVE"  # set: ranks use the attach() of naive.py


@dataclass(frozen=True)
class Rank:
    """Who a case is."""

    rank: int
    ranks: int


class CaseError(AssertionError):
    """What went wrong in which rank, with the tracebacks."""


class Processes:
    """A group of ranks that waits for cases."""

    def __init__(self, ranks: int, *, accelerated: bool = False) -> None:
        self.ranks = ranks
        self._accelerated = accelerated
        self._store: dist.TCPStore | None = None
        self._processes: list[BaseProcess] = []
        self._lines: list[Connection] = []

    def run(
        self,
        case: Callable[..., Any],
        *arguments: Any,
        seconds: float = 180,
        dying: Sequence[int] = (),
    ) -> list[Any]:
        """Calls `case(Rank, *arguments)` in every rank. `dying`: the ranks that are meant to."""
        self.start()
        deadline = time.monotonic() + seconds
        module = Path(inspect.getfile(case)).stem  # pytest may have given it another name
        for line in self._lines:
            line.send((module, case.__name__, arguments))
        answers: list[Any] = [None] * self.ranks
        failures: list[str] = []
        waiting = {line: rank for rank, line in enumerate(self._lines)}
        while waiting and time.monotonic() < deadline:
            for line in wait(list(waiting), deadline - time.monotonic()):
                rank = waiting.pop(line)
                try:
                    answers[rank], failure = line.recv()
                except (EOFError, OSError):
                    failure = "" if rank in dying else "died"
                if failure:
                    failures.append(f"rank {rank}: {failure}")
                    deadline = min(deadline, time.monotonic() + _grace())
        failures += [f"rank {rank}: no answer in time" for rank in waiting.values()]
        if failures or dying:
            self.stop()
        if failures:
            raise CaseError("\n".join(failures))
        return answers

    def start(self) -> None:
        if self._processes:
            return
        # One process imports torch and what ranks need, which takes seconds; they fork from it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.ranks):
            line, other_end = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(Rank(rank, self.ranks), self._store.port, other_end, self._accelerated),
                daemon=True,
            )
            process.start()
            other_end.close()
            self._processes.append(process)
            self._lines.append(line)

    def stop(self) -> None:
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._lines, self._store = [], [], None


def _grace() -> float:
    """Seconds that ranks get to answer once one of them has failed."""
    return 0.3 if os.environ.get(NAIVE) else 2.0  # nearly all cases fail there


def _serve(rank: Rank, port: int, line: Connection, accelerated: bool) -> None:
    torch.set_num_threads(1)
    # The lab may have started the process that forks, and holds Ctrl-C back while it does.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if os.environ.get(NAIVE):
        importlib.import_module("topreduce.torch").attach = importlib.import_module("naive").attach
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    backend = "gloo"
    if accelerated:
        backend = importlib.import_module("accelerators").backend(rank.rank)
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.ranks)
    # What torch keeps need not be looked at after every case. Not even once: a look writes to all
    # the memory that ranks share with the process they fork from, and so takes longer than a case.
    gc.freeze()
    while True:
        try:
            module, case, arguments = line.recv()
        except EOFError:
            return
        _forget_the_last_case()
        try:
            answer = getattr(importlib.import_module(module), case)(rank, *arguments), ""
        except BaseException:
            answer = None, traceback.format_exc()
        line.send(answer)


def _forget_the_last_case() -> None:
    """Every Gloo group has a thread that wakes a hundred times a second, for as long as it lives.

    Not before the next case begins: until then other ranks may still be talking.
    """
    for each in list(_world.pg_map):
        if each is not dist.group.WORLD and each not in kept:
            dist.destroy_process_group(each)
    gc.collect()


@functools.cache
def group(ranks: int) -> Processes:
    """The group of this size that all test modules share; daemons, so they end with pytest."""
    return Processes(ranks)


@functools.cache
def accelerated(ranks: int) -> Processes:
    """The same with an accelerator in each; see accelerators.py."""
    importlib.import_module("accelerators").build()
    return Processes(ranks, accelerated=True)
