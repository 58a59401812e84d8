"""The life of a step: from DDP's hook to a worker thread and back into backward().

DDP calls the hook of every bucket before it waits for any of the futures, so the hook only hands
the bucket over. One worker thread runs all exchanges, in bucket order, and completes the futures
together once the last bucket is through.
"""

import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from topreduce import CommError, Reducer, StepStats, WireError
from topreduce.torch.device import GradientDevice
from topreduce.torch.lane import Lane
from topreduce.torch.process_group import GroupCommunicator
from topreduce.torch.surroundings import Attendance, Surroundings

_HISTORY = 1000
_LAST_WORDS = 5.0  # seconds that the worker gets at exit; it may be waiting for a dead peer


class _Step:
    """What the hook and the worker share about one step."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.in_backward = True
        self.begun = False
        self.density = 1.0
        self.loss_scale = 0.0  # not known
        self.attendance = Attendance()
        self.last_handed_over = 0.0  # when backward began to wait
        self.buckets: list[_Bucket] = []
        self.over = threading.Event()


class _Bucket:
    """A bucket in the worker's hands. The memory belongs to DDP."""

    def __init__(self, bucket: GradBucket, lane: Lane) -> None:
        self.future = lane.future()
        self.buffer = bucket.buffer()
        self._lane, self._computed = lane, lane.mark()
        self.parameters = bucket.parameters()
        self.is_first = bucket.index() == 0
        self.is_last = bucket.is_last()
        # What DDP's memory can hold of a mean that is computed in fp32.
        self.most = min(torch.finfo(each).max for each in (self.buffer.dtype, torch.float32))
        self._float32 = self.buffer

    def gradient(self) -> NDArray[np.float32]:
        """The gradient as the core wants it: DDP's own memory where possible."""
        with self.queued():
            self._float32 = self._lane.to_host(self.buffer.float())
        array: NDArray[np.float32] = self._float32.numpy()
        return array

    def queued(self) -> contextlib.AbstractContextManager[None]:
        """Work on the device, behind what computed the gradient."""
        return self._lane.behind(self._computed)

    def give_back(self) -> None:
        if self._float32 is not self.buffer:
            with self.queued():
                self.buffer.copy_(self._float32, non_blocking=True)

    def complete(self, error: Exception | None) -> None:
        """Lets DDP go on with what the buffer holds; after an error, with zeros."""
        with self.queued():
            if error is not None:
                self.buffer.zero_()
        with self.queued():
            self.future.set_result(self.buffer)


class Steps:
    """Runs the steps of one attached model."""

    def __init__(
        self,
        reducer: Reducer,
        comm: GroupCommunicator,
        numbers: Mapping[int, int],
        surroundings: Surroundings,
        device: GradientDevice | None,
    ) -> None:
        """`numbers`: a parameter's id() and its number in the reducer's layout. `device`: the one
        that the reducer uses.
        """
        self.broken: Exception | None = None  # why no further step is possible
        self.bucket_bytes: list[int] = []  # of the last step, in the order they came
        self.history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)
        self._reducer = reducer
        self._comm = comm
        self._numbers = numbers
        self.surroundings = surroundings
        self._device = device
        self._lanes = {} if device is None else {device.device: device.lane}
        self._step = _Step(None)
        self._step.over.set()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(self._tasks,), name="topreduce", daemon=True
        )
        self._thread.start()
        self._stop = weakref.finalize(self, _end, self._tasks, self._thread, comm)

    def take(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """DDP's hook. Never raises inside backward(): that would break DDP's next step."""
        taken = _Bucket(bucket, self._lane(bucket.buffer().device))
        if taken.is_first:
            self._step = _Step(self.broken)
            self._step.in_backward = _raise_at_the_end_of_backward(self._step)
            try:
                if self._step.in_backward:  # a rank that has joined does not hear of changes
                    self._step.loss_scale = self.surroundings.loss_scale()
                self.surroundings.warn()
            except Exception as error:  # a warning may be one
                self._step.error = self.fail(error)
        step = self._step
        if taken.is_last:
            step.attendance = self.surroundings.attendance(in_backward=step.in_backward)
        step.last_handed_over = time.perf_counter()
        self._tasks.put(lambda: self._reduce(step, taken))
        if taken.is_last and not step.in_backward:  # a rank that has joined early
            step.over.wait()
            if step.error is not None:
                raise step.error.with_traceback(None)
        return taken.future

    def fail(self, error: Exception) -> Exception:
        """No further step is possible: releases peers that wait for us; returns what to raise."""
        self._comm.close(f"{type(error).__name__}: {error}", drops_step=True)
        if isinstance(error, (CommError, WireError)):
            error = type(error)(f"{error}. Nothing more is exchanged until detach().")
        self.broken = error.with_traceback(None)
        return self.broken

    def settle(self) -> None:
        """Waits for the worker; drops a step whose backward pass the user's code cut short."""
        if torch._C._current_graph_task_id() != -1:
            raise ValueError(
                "called inside backward(), whose step is still open: save, load, change settings "
                "and detach between steps"
            )
        if not self._step.over.is_set():
            step = self._step

            def drop() -> None:
                self._reducer.abandon()
                step.over.set()

            self._tasks.put(drop)
            step.over.wait()

    def stop(self) -> None:
        self.settle()
        self._stop()
        self._thread.join()

    def record(self, stats: StepStats, density: float, seconds_waited: float) -> dict[str, Any]:
        """A step as users see it."""
        method = self._reducer.spec["method"]
        ours = {"method": method, "density": density, "seconds_waited": seconds_waited}
        return {**stats.as_dict(), **ours}

    def _reduce(self, step: _Step, bucket: _Bucket) -> None:
        """The worker's part: everything that can fail, or take time, happens here."""
        step.buckets.append(bucket)
        if step.error is None:
            try:
                self._advance(step, bucket)
            except Exception as error:
                self._reducer.abandon()
                # A caller's mistake found before anything was sent leaves the peers in step; and so
                # does what all ranks have found.
                in_step = self._comm.all_hear and (self._comm.in_step or not step.begun)
                usable = isinstance(error, ValueError) and in_step
                step.error = error if usable else self.fail(error)
        if bucket.is_last:
            self._complete(step)

    def _advance(self, step: _Step, bucket: _Bucket) -> None:
        if bucket.is_first:
            step.density = self._reducer.density
            self._begin(step.loss_scale)
            step.begun = True
        if bucket.is_last and step.attendance != Attendance():
            self._reducer.attend(**vars(step.attendance))
        self._add([self._number(each) for each in bucket.parameters], bucket)
        if bucket.is_last:
            with bucket.queued():
                stats = self._reducer.finish()
            self._comm.trim()
            for finished in step.buckets:
                finished.give_back()
            self.bucket_bytes = [each.buffer.nbytes for each in step.buckets]
            waited = time.perf_counter() - step.last_handed_over
            self.history.append(self.record(stats, step.density, waited))

    def _add(self, numbers: list[int], bucket: _Bucket) -> None:
        if self._device is None or not self._reducer.on_device:
            return self._reducer.add(numbers, bucket.gradient(), bucket.most)
        with bucket.queued():
            sizes = [each.numel() for each in bucket.parameters]
            self._device.hold(numbers, sizes, bucket.buffer)
            self._reducer.add_on_device(numbers, bucket.most)

    def _begin(self, loss_scale: float) -> None:
        self._reducer.abandon()  # a backward pass that the user's code cut short
        self._reducer.begin(self._comm, loss_scale)

    def _lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            self._lanes[device] = Lane(device)
        return self._lanes[device]

    def _number(self, parameter: torch.Tensor) -> int:
        number = self._numbers.get(id(parameter))
        if number is None:
            raise ValueError(
                f"DDP reduces a parameter of shape {tuple(parameter.shape)} that was not there at "
                "attach(): wrap the model in a new DistributedDataParallel and attach again"
            )
        return number

    def _complete(self, step: _Step) -> None:
        """Lets backward() go on; after a failure with zeros instead of local gradients."""
        if self._device is not None:
            self._device.release()
        step.over.set()
        for bucket in step.buckets:
            bucket.complete(step.error)
        step.buckets.clear()


def _raise_at_the_end_of_backward(step: _Step) -> bool:
    """Has backward() raise the step's error, once DDP has finished. False outside of backward."""
    engine = torch.autograd.Variable._execution_engine

    def raise_error() -> None:
        if step.error is not None:
            raise step.error.with_traceback(None)

    try:
        # Two levels: callbacks run in the order they came, and DDP's own is still to come.
        engine.queue_callback(lambda: engine.queue_callback(raise_error))
    except RuntimeError:
        return False
    return True


def _end(
    tasks: "queue.SimpleQueue[Callable[[], None] | None]",
    thread: threading.Thread,
    comm: GroupCommunicator,
) -> None:
    """Also at exit: a thread that Python kills inside of C++ takes the whole process with it."""
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join(_LAST_WORDS)
        if thread.is_alive():
            comm.interrupt("is waited for no longer: this process ends")
            thread.join(_LAST_WORDS)


def _run(tasks: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # an idle worker keeps nothing alive
