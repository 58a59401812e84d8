"""The life of a step: what backward() hands over, a worker thread averages.

One worker thread runs all exchanges of the attached model, in the order of the reducer's buckets,
while backward() goes on; when the last gradient is there it votes, commits, and gives the means
back. Who takes gradients, and where the means go, is an adapter's affair (ddp.py).
"""

import contextlib
import os
import queue
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import torch

from topreduce import CommError, DriftError, Reducer, WireError
from topreduce._core import Handover
from topreduce.torch.averager import Averager, Stats
from topreduce.torch.clock import StepClock
from topreduce.torch.lane import Lane
from topreduce.torch.process_group import GroupCommunicator
from topreduce.torch.surroundings import Participation, Surroundings
from topreduce.torch.taker import Batch
from topreduce.torch.verifying import Verifier

_HISTORY = 1000
_WATCHED, _LAST = 300, 50  # steps until a search is judged, by the last of them
_FAR_TOO_LONG = 0.3  # a part of a step
_LAST_WORDS = 5.0  # seconds that the worker gets at exit; it may be waiting for a dead peer
_GIVING_UP = 30.0  # and from then on: it may be asking others who did not come
_NICENESS = 5  # of the worker: where cores are short, what computes gradients goes first


class Step:
    """What backward() and the worker share about one step."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.in_backward = True
        self.begun = False
        self.level = ""  # what it sends, in a word
        self.loss_scale: Callable[[], float] = lambda: 0.0  # not known
        self.participation = Participation()
        self.fingerprint: Callable[[int], int | None] = lambda step: None  # of the parameters
        self.gradients: Handover | None = None  # for those that need no Python on their way
        self.last_handed_over = 0.0  # when backward began to wait
        self.computed = self.waited = 0.0  # seconds until then, and from then on
        self.over = threading.Event()

    def let_go(self) -> None:
        """No gradients are needed any more."""
        if self.gradients is not None:
            self.gradients.close()


class _Tasks:
    """What the worker is to do, in this order."""

    def __init__(self, comm: GroupCommunicator) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._comm = comm
        self.attends = False  # the worker, to what is under way, where only `wake` reaches it
        self.gradients: Handover | None = None  # of the open step

    def put(self, task: Callable[[], None] | None) -> None:
        """None: come to an end."""
        self._queue.put(task)
        if self.attends:
            if self.gradients is not None:
                self.gradients.interrupt()
            self._comm.wake()

    def look(self) -> None:
        """Gradients were put into `gradients`."""
        if self.attends:
            self._comm.wake()
        else:
            self._queue.put(_look)

    def next(self) -> Callable[[], None] | None:
        return self._queue.get()

    @property
    def empty(self) -> bool:
        return self._queue.empty()

    @property
    def brought(self) -> bool:
        """Whether there are gradients that the worker did not take."""
        return self.gradients is not None and not self.gradients.empty


def _look() -> None:
    """The worker attends after each task, and then takes gradients."""


class Receiver(Protocol):
    """Where the means of a step go. Called by the worker."""

    def queued(self) -> contextlib.AbstractContextManager[None]:
        """Work on the device, behind what computed the gradients."""

    def give_back(self) -> None:
        """The step went through."""

    def complete(self, error: Exception | None) -> None:
        """Lets backward() go on."""


class Steps:
    """Runs the steps of one attached model."""

    def __init__(
        self,
        reducer: Averager,
        comm: GroupCommunicator,
        surroundings: Surroundings,
        verifier: Verifier,
        clock: StepClock,
        lane: Lane,
    ) -> None:
        """`lane`: of the device that the reducer uses, or of main memory."""
        self.broken: Exception | None = None  # why no further step is possible
        self.history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)
        self._warned = False  # that waiting cannot be helped
        self._reducer = reducer
        self._flat = reducer if isinstance(reducer, Reducer) else None
        self._comm = comm
        self.surroundings = surroundings
        self.verifier = verifier
        self._clock = clock
        self._lane = lane
        self._step = Step(None)
        self._step.over.set()
        self._start()

    def _start(self) -> None:
        comm = self._comm
        tasks = self._tasks = _Tasks(comm)
        self._thread = threading.Thread(
            target=_run, args=(tasks, weakref.ref(self)), name="topreduce", daemon=True
        )
        self._thread.start()
        self._last_resort = weakref.finalize(self, _leave, os.getpid(), tasks, self._thread, comm)

    def open(self) -> Step:
        """A step begins; one that user code cut short is forgotten. Never raises."""
        step = self._step = Step(self.broken)
        if self._flat is not None:
            step.gradients = self._tasks.gradients = Handover()
        step.in_backward = is_in_backward()
        step.participation = self.surroundings.participation(in_backward=step.in_backward)
        try:
            if step.in_backward:  # a rank that has joined does not hear of changes
                step.loss_scale = self.surroundings.loss_scale()
            step.fingerprint = self.verifier.mark()
            self.surroundings.warn()
        except Exception as error:  # a warning may be one
            step.error = self.fail(error)
        return step

    def hand_over(self, step: Step, task: Callable[[], None]) -> None:
        """The worker does it, unless the step has failed; if it raises, the step has."""
        step.last_handed_over = time.perf_counter()
        self._tasks.put(lambda: self._advance(step, task))

    def bring(self, step: Step, batch: Batch, lent: Collection[int] = ()) -> bool:
        """Hands over gradients that lie in main memory as the core wants them, without Python on
        the worker's side. False, and nothing is done: they need a task. `lent`: parameters whose
        gradients nobody else needs.
        """
        if step.gradients is None or not step.begun or step.error is not None:
            return False
        if any(gradient.dtype is not torch.float32 for _, gradient in batch):
            return False
        step.last_handed_over = time.perf_counter()
        for ours in (True, False):
            part = [each for each in batch if (each[0] in lent) is ours]
            if part:
                numbers = [number for number, _ in part]
                addresses = [gradient.data_ptr() for _, gradient in part]
                sizes = [gradient.numel() for _, gradient in part]
                step.gradients.put(numbers, addresses, sizes, ours, part)
        self._tasks.look()
        return True

    def close(self, step: Step, receiver: Receiver) -> None:
        """All gradients were handed over."""
        self._tasks.put(lambda: self._close(step, receiver))

    def fail(self, error: Exception) -> Exception:
        """No further step is possible: releases peers that wait for us; returns what to raise."""
        self._comm.close(f"{type(error).__name__}: {error}")
        if isinstance(error, (CommError, WireError, DriftError)):
            error = type(error)(f"{error}. Nothing more is exchanged until rebuild() or detach().")
        self.broken = error.with_traceback(None)
        return self.broken

    def wait_until_idle(self) -> None:
        """Waits for the worker; drops a step whose backward pass the user's code cut short."""
        if is_in_backward():
            raise ValueError(
                "called inside backward(), whose step is still open: save, load, change settings "
                "and detach between steps"
            )
        if not self._step.over.is_set():
            step = self._step

            def drop() -> None:
                self._reducer.abandon()
                step.let_go()
                step.over.set()

            self._tasks.put(drop)
            step.over.wait()

    def stop(self) -> None:
        self._end_thread()
        self._clock.release()

    def reconnect(self, comm: GroupCommunicator) -> None:
        """Goes on with other connections."""
        self._end_thread()
        self._comm, self.broken = comm, None
        self._start()

    def _end_thread(self) -> None:
        self.wait_until_idle()
        _end(self._tasks, self._thread, self._comm)
        self._thread.join()
        self._last_resort.detach()

    def record(self, stats: Stats, level: str) -> dict[str, Any]:
        """A step as users see it. `level`: what it sent, in a word."""
        told: dict[str, Any] = dict(stats.as_dict())
        exchanging = told["seconds_exchanging"]
        exposed = told["seconds_exposed"]
        return {
            **told,
            "method": self._reducer.spec["method"],
            "level": level,
            "reason": self._reducer.reason,
            "hidden": 1 - exposed / exchanging if exchanging > 0 else 0.0,
        }

    # ---- the worker's part: everything that can fail, or take time -----------------------------

    def attend(self) -> bool:
        """Goes on with what comes, until there is a task. Whether more is under way."""
        step, busy = self._step, False

        def attend() -> None:
            nonlocal busy
            busy = self._reducer.attend()

        if step.begun and not step.over.is_set():
            with self._lane.entered():  # exchanges may begin that had to wait for others
                self._advance(step, attend)
        return busy

    def _advance(self, step: Step, task: Callable[[], None]) -> None:
        if step.error is not None:
            return
        try:
            if not step.begun:
                step.level = self._reducer.level
                self._begin(step.loss_scale())
                if self._flat is not None and step.gradients is not None:
                    self._flat.take_from(step.gradients)
                step.begun = True
                if step.participation != Participation():
                    self._reducer.participate(**vars(step.participation))
                self._verify(step)
            task()
        except Exception as error:
            self._reducer.abandon()
            step.let_go()
            # A caller's mistake found before anything was sent leaves the peers in step, and so
            # does what all ranks have found.
            in_step = self._comm.all_hear and (self._comm.in_step or not step.begun)
            usable = isinstance(error, ValueError) and in_step
            step.error = error if usable else self.fail(error)

    def _close(self, step: Step, receiver: Receiver) -> None:
        self._advance(step, lambda: self._finish(step, receiver))
        step.let_go()
        step.over.set()
        receiver.complete(step.error)

    def _finish(self, step: Step, receiver: Receiver) -> None:
        with receiver.queued():
            stats = self._reducer.finish()
        self._comm.trim()
        receiver.give_back()
        self._time(step)
        told = self.record(stats, step.level)
        told["seconds_computed"], told["seconds_waited"] = step.computed, step.waited
        self.history.append(told)
        if not self._warned and len(self.history) >= _WATCHED and self._reducer.step % _LAST == 0:
            self._look_for_waiting_in_vain()

    def _look_for_waiting_in_vain(self) -> None:
        spec = self._reducer.spec
        if spec["density"] == "auto":
            part = waited_in_vain(self.history, float(spec["min_density"]))
            self.surroundings.in_vain, self._warned = part, part is not None

    def _time(self, step: Step) -> None:
        """What backward() waited for us, which is what a density is found by."""
        began, last = self._clock.end(), step.last_handed_over
        step.waited = time.perf_counter() - last
        known = self._reducer.stats.seconds_computed
        step.computed = known if began is None or began > last else last - began
        self._reducer.timed(step.computed, step.waited)

    def _verify(self, step: Step) -> None:
        fingerprint = step.fingerprint(self._reducer.step)
        if fingerprint is not None:
            self._reducer.verify(fingerprint)

    def _begin(self, loss_scale: float) -> None:
        self._reducer.abandon()  # a backward pass that the user's code cut short
        self._reducer.begin(self._comm, loss_scale)


def waited_in_vain(history: Iterable[Mapping[str, Any]], least: float) -> float | None:
    """The usual part of the last steps that was waited, if it is large although they sent as
    little as they may."""
    last = list(history)[-_LAST:]
    if any(each["density"] > 1.1 * least for each in last):
        return None
    parts = [
        each["seconds_waited"] / (each["seconds_computed"] + each["seconds_waited"])
        for each in last
    ]
    usual = statistics.median(parts)
    return usual if usual > _FAR_TOO_LONG else None


def is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _end(tasks: _Tasks, thread: threading.Thread, comm: GroupCommunicator) -> None:
    """Has the worker come to its end, unless that takes too long."""
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join(_LAST_WORDS)
        if thread.is_alive():
            comm.interrupt("is waited for no longer: this process ends")
            thread.join(_GIVING_UP)


def _leave(
    process: int,
    tasks: _Tasks,
    thread: threading.Thread,
    comm: GroupCommunicator,
) -> None:
    """Nobody has the model any more, or the process ends. A thread that comes back from C++ while
    Python ends takes the whole process with it, by std::terminate: ours must be gone by then, and
    so must Gloo's that hold tensors of ours.
    """
    if os.getpid() != process:  # a fork has no such threads
        return
    _end(tasks, thread, comm)
    if thread is threading.current_thread() or not thread.is_alive():
        comm.end_threads()


def _yield_to_computing() -> None:
    """Lowers the priority of the calling thread, which on Linux is its own."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _run(tasks: _Tasks, owner: "weakref.ref[Steps]") -> None:
    _yield_to_computing()
    busy = False  # something is under way
    while True:
        tasks.attends = busy
        if not busy or not tasks.empty:
            tasks.attends = False
            if tasks.empty and tasks.brought:  # just before, so that nobody will say it again
                busy = True
                continue
            task = tasks.next()
            if task is None:
                return
            task()
            del task  # an idle worker keeps nothing alive
            busy = True
            continue
        steps = owner()
        busy = steps is not None and steps.attend()
        del steps
