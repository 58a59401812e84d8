"""One line on a DDP model: checks, wiring, and the one hook that DDP lets us register."""

import re
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from topreduce import Layout, Reducer
from topreduce.torch.ddp import DDPAdapter
from topreduce.torch.device import GradientDevice, device_of
from topreduce.torch.eligibility import (
    REMEDY,
    check_model,
    check_parameter,
    check_type,
)
from topreduce.torch.machines import Levels
from topreduce.torch.meeting import refuse
from topreduce.torch.process_group import GroupCommunicator, timeout_of
from topreduce.torch.scaling import Scaler
from topreduce.torch.steps import Steps
from topreduce.torch.surroundings import Surroundings
from topreduce.torch.sync import Sync, as_setting
from topreduce.torch.two_levels import on_two_levels

# How a training begins unless told otherwise: without, a GPT at 1 % needs twice the steps.
WARMUP_STEPS = 10
RAMP_STEPS = 100

_SCALERS = " (all ranks must give one, GradScaler(enabled=False) where the loss is not scaled)"


class _Dispatcher:
    """Whom DDP's hook serves. DDP cannot remove a hook, so it stays when the handle goes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # DDP's C++ part owns this object, where the garbage collector sees no cycle: nothing here
        # may lead back to the DDP model.
        self._group = group
        self.adapter: DDPAdapter | None = None
        self.owed = ""  # says so if an earlier handle left debts

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        if self.adapter is not None:
            return self.adapter.reduce(bucket)
        return allreduce_hook(self._group, bucket)

    def release(self, owed: str) -> None:
        """DDP averages by itself again. `owed`: in words, what the handle leaves unpaid."""
        if self.adapter is not None:
            self.adapter.release()
        self.adapter, self.owed = None, owed

    def __reduce__(self) -> tuple[Any, ...]:
        return object, ()  # a copy of the DDP model is not attached


_dispatchers: "weakref.WeakKeyDictionary[DistributedDataParallel, _Dispatcher]" = (
    weakref.WeakKeyDictionary()
)


def _hook(state: _Dispatcher, bucket: GradBucket) -> Future[torch.Tensor]:
    return state.reduce(bucket)


def attach(
    ddp: DistributedDataParallel,
    method: str = "topk",
    *,
    density: float | None = None,
    granularity: str | None = None,
    bucket_cap_mb: float | None = None,
    values: str | None = None,
    feedback: str | None = None,
    select: str | None = None,
    keep_dense: str | Sequence[str] = (),
    warmup_steps: int | None = None,
    ramp_steps: int | None = None,
    seed: int | None = None,
    scaler: Scaler | None = None,
    local_group: dist.ProcessGroup | str | None = None,
    timeout: timedelta | None = None,
    **settings: object,
) -> Sync:
    """Averages the gradients of `ddp` by `method` from the next backward pass on.

    Collective over the ranks of the model's process group; if one refuses, or they differ in model,
    method, settings or version, all of them raise and nothing is attached. What is None has the
    method's default; `topreduce methods` lists them. The first `warmup_steps` (10) are dense, then
    the density falls geometrically over `ramp_steps` (100). `bucket_cap_mb`: gradients that are
    exchanged together, as they become ready; DDP's own buckets do not matter. `keep_dense`:
    patterns such as "*norm*" for parameters that are never cut. `scaler`: the GradScaler that
    multiplies your loss, so that what is owed is kept without its factor. `local_group`: the ranks
    of this rank's machine, as a process group, or "host" for those of one host name and boot;
    gradients are then averaged inside each machine first, and one rank of each exchanges, and owes.
    `timeout`: how long to wait for a peer that is silent, which may just be busy; None waits as
    long as the model's process group. A rank whose model is not DDP can tell the default process
    group that it refuses; those of another group wait for their time-out.
    """
    try:
        check_type(ddp)
        dispatcher = _dispatchers.get(ddp)
        if dispatcher is not None and dispatcher.adapter is not None:
            raise ValueError("this model is attached already: detach() its handle first")
        given = {
            "density": density,
            "granularity": granularity,
            "bucket_cap_mb": bucket_cap_mb,
            "values": values,
            "feedback": feedback,
            "select": select,
            "keep_dense": as_setting(keep_dense) or None,
            "warmup_steps": _or_default(warmup_steps, "warmup_steps", method, WARMUP_STEPS),
            "ramp_steps": _or_default(ramp_steps, "ramp_steps", method, RAMP_STEPS),
            "seed": seed,
            # The backward pass leaves its cores when the last gradient is there.
            "threads": _or_default(None, "threads", method, torch.get_num_threads()),
            **settings,
        }
    except Exception as error:
        refuse(ddp, error)
        raise
    patience = timeout if _is_valid(timeout) else _timeout_of(ddp)
    comm = (
        GroupCommunicator(ddp.process_group, patience)
        if local_group is None
        else Levels(ddp.process_group, local_group, patience)
    )
    try:
        reducer, parameters, device = _prepare_together(comm, ddp, method, given, timeout, scaler)
        reducer.agree(comm)
        if dispatcher is None:
            dispatcher = _Dispatcher(ddp.process_group)
            ddp.register_comm_hook(dispatcher, _hook)
            _dispatchers[ddp] = dispatcher
    except BaseException as error:
        comm.close(f"attach: {error}")
        raise
    surroundings = Surroundings(ddp, parameters.values(), _frozen(ddp), scaler)
    surroundings.forgotten, dispatcher.owed = dispatcher.owed, ""
    steps = Steps(reducer, comm, surroundings)
    # Ranks of a machine add up whole buckets of DDP.
    one_level = not isinstance(comm, Levels)
    dispatcher.adapter = DDPAdapter(ddp, steps, reducer, parameters, device, takes_early=one_level)
    return Sync(reducer, comm, steps, dispatcher.release)


def _or_default(given: int | None, name: str, method: str, default: int) -> int | None:
    """What was given, unless that is nothing and the method's own words do not name it either."""
    named = re.search(rf"\b{name}\s*=", method) is not None
    return default if given is None and not named else given


class _Prepared(NamedTuple):
    """A reducer for the model, the model's parameters in its order, and where they lie."""

    reducer: Reducer
    parameters: dict[str, torch.nn.Parameter]
    device: GradientDevice | None


def _prepare_together(
    comm: GroupCommunicator,
    ddp: DistributedDataParallel,
    method: str,
    given: dict[str, object],
    timeout: timedelta | None,
    scaler: object,
) -> _Prepared:
    """`_prepare` on all ranks or on none: a rank that refuses leaves nobody waiting."""
    refusal: Exception | None = None
    try:
        prepared = _prepare(comm, ddp, method, given, timeout, scaler)
    except Exception as error:
        refusal = error
    try:
        scaled = "" if scaler is None else f", scaler given{_SCALERS}"
        ready = f"ready{scaled}"
        comm.concur(ready if refusal is None else f"{type(refusal).__name__}: {refusal}")
    except ValueError:
        if refusal is None:
            raise
    if refusal is not None:
        raise refusal
    return prepared


def _prepare(
    comm: GroupCommunicator,
    ddp: DistributedDataParallel,
    method: str,
    given: dict[str, object],
    timeout: timedelta | None,
    scaler: object,
) -> _Prepared:
    """Raises what speaks against attaching, on this rank."""
    if timeout is not None and not _is_valid(timeout):
        raise ValueError(f"timeout must be a positive timedelta, not {timeout!r}")
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise ValueError(f"scaler must be a GradScaler, not {type(scaler).__name__}")
    check_model(ddp)
    if ddp not in _dispatchers:
        hook = ddp._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
        if hook:
            raise ValueError(f"DDP takes one hook and already has {hook}: {REMEDY}")
    parameters = _parameters(ddp)
    layout = Layout([(name, _stored_shape(each)) for name, each in parameters.items()])
    settings = {name: value for name, value in given.items() if value is not None}
    if isinstance(comm, Levels):  # what ranks of a machine add up is in its main memory
        return _Prepared(on_two_levels(comm, layout, method, settings), parameters, None)
    reducer = Reducer(layout, method, **settings)
    device = device_of(parameters.values())
    reducer.use(device)
    return _Prepared(reducer, parameters, device)


def _parameters(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Those that DDP reduces, in registration order."""
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    reduced = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
    parameters = {}
    for name, parameter in ddp.module.named_parameters():
        if id(parameter) in reduced:
            parameters[_plain(name)] = parameter
        elif parameter.requires_grad and name not in ddp.parameters_to_ignore:
            raise ValueError(
                f"{name} was frozen when DDP wrapped it, and never gets a mean: {REMEDY}"
            )
    for name, parameter in parameters.items():
        check_parameter(name, parameter)
    return parameters


def _frozen(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    return {
        _plain(name): parameter
        for name, parameter in ddp.module.named_parameters()
        if not parameter.requires_grad and name not in ddp.parameters_to_ignore
    }


def _plain(name: str) -> str:
    """The name that a parameter has without torch.compile, so that checkpoints fit both."""
    return name.replace("_orig_mod.", "")


def _stored_shape(parameter: torch.Tensor) -> list[int]:
    """The shape in the order of memory, which is how DDP lays out gradients (channels_last)."""
    axes = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if parameter.is_contiguous() or not parameter.permute(axes).is_contiguous():
        return list(parameter.shape)
    return [parameter.shape[axis] for axis in axes]


def _timeout_of(ddp: DistributedDataParallel) -> timedelta:
    device = next((each.device for each in ddp.parameters()), torch.device("cpu"))
    return timeout_of(ddp.process_group, device)


def _is_valid(timeout: object) -> TypeGuard[timedelta]:
    return isinstance(timeout, timedelta) and timeout > timedelta(0)
