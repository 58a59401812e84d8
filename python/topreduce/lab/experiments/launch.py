"""Ranks as processes of this machine: start them, hear them, leave none behind."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from topreduce.lab.network.cluster import Place
from topreduce.lab.network.namespaces import enter

Options = TypeVar("Options")
Report = TypeVar("Report")
Result = TypeVar("Result")
Body = Callable[[int, int, Options, Callable[[Report], None]], Result]

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=5)
# One process imports what ranks need, which takes seconds of a processor; they fork from it.
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "topreduce.lab.experiments.race",
    "topreduce.lab.experiments.train",
]
SECONDS_AFTER_FAILURE = 1.0  # to hear every rank's complaint and find the one that began
SECONDS_TO_END = 30.0


class RankError(RuntimeError):
    """A rank raised or died; the message holds its traceback."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} {reason}")
        self.rank = rank


def launch(
    body: Body[Options, Report, Result],
    world_size: int,
    options: Options,
    on_report: Callable[[Report], None] = lambda report: None,
    places: Sequence[Place] | None = None,
    backend: str = "gloo",
) -> list[Result]:
    """Run `body(rank, world_size, options, report)` in processes joined by a process group.

    `places`: where each rank runs; without them all share this machine's loopback interface.
    `backend`: as for torch.distributed.init_process_group.
    Returns the results by rank; what a body reports arrives at `on_report` as it goes. The body
    must be importable by name, and what it takes and gives is pickled. When this call is over,
    for whatever reason, so are its processes.
    """
    if world_size < 1:
        raise ValueError(f"launch: world_size must be at least 1, not {world_size}")
    places = places or [_loopback()] * world_size
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="topreduce-") as folder:
        try:
            with _interrupts_held_back():
                for rank, place in zip(range(world_size), places, strict=True):
                    ranks.append(
                        _Rank(rank, world_size, place, Path(folder), backend, body, options)
                    )
            _listen(ranks, on_report)
        finally:
            for one in ranks:
                one.end()
    return [one.result for one in ranks]


# ---- in the parent --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reported:
    value: Any


@dataclass(frozen=True)
class _Returned:
    value: Any


@dataclass(frozen=True)
class _Failed:
    reason: str
    when: float  # on the machine's clock: the first failure is the cause of the others


class _Rank:
    """A rank's process, and what was heard of it."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        place: Place,
        folder: Path,
        backend: str,
        body: Body[Any, Any, Any],
        options: Any,
    ) -> None:
        self.rank = rank
        self.talks = True
        self.returned = False
        self.result: Any = None
        self.failure: _Failed | None = None
        self._output = folder / f"output-{rank}"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.pipe, sender = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_run,
            args=(rank, world_size, place, folder, self._output, sender, backend, body, options),
            name=f"topreduce-rank-{rank}",
            daemon=True,
        )
        self._process.start()
        sender.close()  # so that the rank's death ends its pipe

    def hear(self, on_report: Callable[[Any], None]) -> None:
        """Take one message, or notice the end of the process."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            self.talks = False
            self._process.join(SECONDS_TO_END)
            code = self._process.exitcode
            if code != 0 and self.failure is None:
                self.failure = _Failed(f"died: {_cause(code)}\n{self._last_output()}", when=0.0)
            return
        if isinstance(message, _Reported):
            on_report(message.value)
        elif isinstance(message, _Returned):
            self.returned, self.result = True, message.value
        else:
            self.failure = message

    def end(self) -> None:
        """Make sure that the process is gone."""
        self._process.kill()
        self._process.join()
        self.pipe.close()

    def _last_output(self) -> str:
        if not self._output.exists():
            return ""
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-40:])


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _listen(ranks: Sequence[_Rank], on_report: Callable[[Any], None]) -> None:
    deadline: float | None = None
    while talking := {one.pipe: one for one in ranks if one.talks}:
        if deadline is None and any(one.failure for one in ranks):
            deadline = time.monotonic() + SECONDS_AFTER_FAILURE
        elif deadline is None and all(one.returned for one in ranks):
            deadline = time.monotonic() + SECONDS_TO_END
        seconds_left = None if deadline is None else deadline - time.monotonic()
        if seconds_left is not None and seconds_left < 0:
            break
        ready = connection.wait(list(talking), seconds_left)
        for pipe, one in talking.items():
            if pipe in ready:
                one.hear(on_report)

    failures = [(one.failure.when, one.rank, one.failure.reason) for one in ranks if one.failure]
    if failures:
        _, rank, reason = min(failures)
        raise RankError(rank, reason)


def _loopback() -> Place:
    names = {name for _, name in socket.if_nameindex()}
    return Place(interface="lo" if "lo" in names else "lo0")


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    # Children inherit the blocked signal: Ctrl-C reaches this process alone, which ends them.
    resource_tracker.ensure_running()  # started later, it would lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # Threads of libraries may still take the signal, and Python then raises here: not in between.
    held: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda *_: held.append(1)) if in_main else None
    try:
        yield
    finally:
        if in_main:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if held:
        raise KeyboardInterrupt


# ---- in a rank's process --------------------------------------------------------------------


def _run(
    rank: int,
    world_size: int,
    place: Place,
    folder: Path,
    output: Path,
    pipe: connection.Connection[Any, Any],
    backend: str,
    body: Body[Any, Any, Any],
    options: Any,
) -> None:
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    _redirect_output(output)
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    try:
        _keep_freed_memory()
        if place.namespace is not None:
            enter(place.namespace)  # before any thread that opens connections
        # A file instead of a port: no two launches can meet.
        dist.init_process_group(
            backend,
            init_method=f"file://{folder / 'meeting'}",
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        result = body(rank, world_size, options, lambda report: pipe.send(_Reported(report)))
        dist.destroy_process_group()
        pipe.send(_Returned(result))
    except BaseException:
        pipe.send(_Failed(f"raised\n{traceback.format_exc()}", time.monotonic()))
        os._exit(1)  # at once: closed sockets release the peers, and no thread is waited for


def _end_with_parent(folder: Path) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)  # a killed parent could not
    os._exit(1)


def _keep_freed_memory() -> None:
    """Otherwise glibc gives gradients back to the system and gets them anew, page by page, in every
    step of a process with one model, but not in one with several: what a step takes would depend on
    which other methods are in the race.
    """
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 32 << 20)  # the most that it takes
        mallopt(trim_threshold, 2**31 - 1)


def _redirect_output(output: Path) -> None:
    # Libraries write to the terminal from native code, across the parent's progress bar.
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable()
