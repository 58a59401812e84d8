"""One line on a model: checks and wiring. What is particular to a kind of model: kinds.py."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from topreduce import Layout
from topreduce.torch.averager import Averager
from topreduce.torch.clock import StepClock
from topreduce.torch.ddp_kind import DDPKind
from topreduce.torch.device import bucket_cap_mb, place_of
from topreduce.torch.eligibility import check_parameter, check_type
from topreduce.torch.fsdp import local_part
from topreduce.torch.fsdp_kind import FSDPKind
from topreduce.torch.gradients import stored_shape
from topreduce.torch.kinds import Kind, Parameters, plain_name
from topreduce.torch.lane import MAIN_MEMORY, Lane
from topreduce.torch.machine_device import MachineDevice
from topreduce.torch.machines import Levels
from topreduce.torch.meeting import Ranks, refusal_of, refuse
from topreduce.torch.module_kind import ModuleKind
from topreduce.torch.process_group import GroupCommunicator
from topreduce.torch.scaling import Scaler
from topreduce.torch.steps import Steps
from topreduce.torch.summing_device import SummingDevice
from topreduce.torch.surroundings import Surroundings
from topreduce.torch.sync import Sync, as_setting
from topreduce.torch.verifying import Verifier

# How a training begins unless told otherwise: without, a GPT at 1 % needs twice the steps.
WARMUP_STEPS = 10
RAMP_STEPS = 100

_SCALER = "a scaler (give one on all ranks, GradScaler(enabled=False) where the loss is not scaled)"


def attach(
    model: torch.nn.Module,
    method: str = "auto",
    *,
    group: dist.ProcessGroup | Ranks | None = None,
    replicas: DeviceMesh | dist.ProcessGroup | None = None,
    density: float | str | Sequence[float | str] | os.PathLike[str] | None = None,
    overhead: float | None = None,
    min_density: float | None = None,
    max_density: float | None = None,
    budget_bytes: float | None = None,
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
    verify_every: int = 0,
    commit_if: Callable[[], bool] | None = None,
    **settings: object,
) -> Sync:
    """Averages the gradients of `model` by `method` from the next backward pass on.

    Collective over all ranks that train the model: if one refuses, or they differ in model, method,
    settings or version, all of them raise and nothing is attached. Arguments left as None use the
    method's default; `topreduce methods` lists these, and all other settings.

    - `model`: a DistributedDataParallel; or any module, with `group`; or the root of FSDP2
      (fully_shard), with `replicas`.
    - `method`: a name, or one with settings such as "topk:density=0.01"; "auto" chooses one.
    - `group`: the ranks that train a module without DDP. All of them get the parameters and
      buffers of its first rank, once.
    - `replicas`: the ranks that hold the same shards, as a process group or a mesh of one
      dimension.
    - `density`: the share of entries that each rank sends. The first `warmup_steps` (10) are
      dense, then the density falls geometrically over `ramp_steps` (100). "auto", the default of
      every method, sends as much as hides behind the backward pass. A list of densities, or a file
      of them, repeats another run (`Sync.choices`).
    - `overhead`, `min_density`, `max_density`, `budget_bytes`: limits for "auto". `backward()`
      waits for us for at most `overhead` (5 %) of a step; in the first `warmup_steps` for
      `ramp_overhead` (40 %), which falls to `overhead` over `ramp_steps`. The density stays
      between `min_density` (0.1 %) and `max_density`, and a rank sends about `budget_bytes`
      in a step at the most.
    - `granularity`: "bucket" exchanges gradients as they become ready, "model" all at the end.
    - `bucket_cap_mb`: megabytes of gradients that are exchanged together (1; on a device more, by
      the size of the model, so that a step stops it about a hundred times at most). DDP's own
      buckets do not matter.
    - `values`: how numbers travel, such as "bf16"; `feedback`, `select`: other stages than the
      method's.
    - `keep_dense`: patterns such as "*norm*" for parameters that are sent whole in every step.
    - `seed`: of all random choices; the same on all ranks.
    - `scaler`: the GradScaler that multiplies your loss, so that what is owed is kept without its
      factor.
    - `local_group`, for DDP: the ranks of this rank's machine, as a process group, or "host" for
      those of one host name and boot. Gradients are averaged inside each machine first, and one
      rank of each exchanges, and owes.
    - `timeout`: how long to wait for a peer that is silent, which may just be busy; None waits as
      long as the model's process group.
    - `verify_every`: after how many steps the parameters, and the means, are compared over the
      ranks, with a DriftError on all of them that names the rank that differs; 0 for never.
    - `commit_if`: asked on this rank before a step is committed; if it says no, backward() raises
      CommError, and since other ranks may have committed, `rebuild()` must follow.
    """
    if dist.GroupMember.NON_GROUP_MEMBER in (group, replicas):
        raise ValueError("this rank is not in the group: call attach on the ranks of the group")
    kind: Kind | None = None
    try:
        kind = _kind_of(model, group, replicas)
        _check_method(method)
        if kind.is_attached():
            raise ValueError("this model is attached already: detach() its handle first")
        if local_group is not None and not isinstance(kind, DDPKind):
            raise ValueError("local_group is for DistributedDataParallel: attach without it")
        _check_local_group(local_group)
        if local_group is not None and commit_if is not None:
            raise ValueError("commit_if is for ranks that exchange themselves, without local_group")
        if not isinstance(verify_every, int) or verify_every < 0:
            raise ValueError(f"verify_every must be a number of steps, not {verify_every!r}")
        given = {
            "overhead": overhead,
            "min_density": min_density,
            "max_density": max_density,
            "budget_bytes": budget_bytes,
            "density": _or_default(
                as_setting(density), "density", method, found_by_default(method)
            ),
            "granularity": granularity,
            "bucket_cap_mb": bucket_cap_mb,
            "values": values,
            "feedback": feedback,
            "select": select,
            "keep_dense": _patterns(keep_dense, kind.module) or None,
            "warmup_steps": _or_default(warmup_steps, "warmup_steps", method, WARMUP_STEPS),
            "ramp_steps": _or_default(ramp_steps, "ramp_steps", method, RAMP_STEPS),
            "seed": seed,
            # The backward pass leaves its cores when the last gradient is there.
            "threads": _or_default(None, "threads", method, torch.get_num_threads()),
            **settings,
        }
    except Exception as error:
        refuse([] if kind is None else kind.places(), error)
        raise
    comm = kind.connect(local_group, timeout if _is_valid(timeout) else kind.timeout())
    try:
        trained = (each for each in kind.model.parameters() if each.requires_grad)
        comm.find_device_backend(kind.group, place_of(trained))
        terms = f"{'no scaler' if scaler is None else _SCALER}, verify_every={verify_every}"
        reducer, parameters, device = _prepare_together(
            comm, kind, method, given, timeout, scaler, terms
        )
        reducer.agree(comm)
        kind.take_over(comm)
    except BaseException as error:
        comm.close(f"attach: {error}")
        raise
    surroundings = Surroundings(
        kind.model,
        kind.module,
        parameters.values(),
        kind.frozen(),
        scaler,
        kind.advice,
        sparse=reducer.spec["method"] != "dense",
    )
    surroundings.forgotten = kind.debts()
    reducer.commit_if(commit_if)
    verifier = Verifier(parameters.values(), local_part, verify_every)
    lane = Lane(MAIN_MEMORY) if device is None else device.lane
    steps = Steps(reducer, comm, surroundings, verifier, StepClock(kind.model), lane)
    attached = kind.start(steps, reducer, parameters, device)
    return Sync(reducer, comm, steps, attached, terms, device)


def _kind_of(model: object, group: object, replicas: object) -> Kind:
    check_type(model, group, replicas)
    if isinstance(model, DistributedDataParallel):
        return DDPKind(model)
    assert isinstance(model, torch.nn.Module)
    if replicas is not None:
        return FSDPKind(model, replicas)
    assert isinstance(group, (dist.ProcessGroup, Ranks))
    return ModuleKind(model, group)


def _check_method(method: object) -> None:
    if isinstance(method, str):
        return
    meant = f": write density={method!r}" if isinstance(method, float) else ""
    raise TypeError(f'method must be a name such as "topk", not {method!r}{meant}')


def found_by_default(method: str) -> str | None:
    """The density of a method that is named without one: sought while running, if it has any."""
    return None if method.partition(":")[0].strip() == "dense" else "auto"


def _check_local_group(local_group: object) -> None:
    if local_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "local_group: this rank is not in that group; give each rank the group of its own "
            "machine, as torch.distributed.new_subgroups() returns it"
        )
    is_host = isinstance(local_group, str) and local_group == "host"
    if not (local_group is None or is_host or isinstance(local_group, dist.ProcessGroup)):
        raise ValueError(
            "local_group must be 'host', or the process group of the ranks of this rank's machine, "
            f"not {local_group!r}"
        )


def _patterns(keep_dense: object, module: torch.nn.Module) -> str:
    """With spaces between. TypeError for what is no name, with the name of what was meant."""
    patterns: list[object] = [] if keep_dense is None else [keep_dense]
    if isinstance(keep_dense, (list, tuple)):
        patterns = list(keep_dense)
    for each in patterns:
        if not isinstance(each, str):
            names = [name for name, known in module.named_parameters() if known is each]
            names += [
                f"{name}.*" for name, known in module.named_modules() if known is each and name
            ]
            names += ["*"] if each is module else []
            meant = f": write {plain_name(names[0])!r}" if names else ""
            raise TypeError(
                "keep_dense takes a list of names and patterns, such as ['*norm*'], not "
                f"{type(each).__name__}{meant}"
            )
    return " ".join(map(str, patterns))


def _or_default(given: object, name: str, method: str, default: object) -> object:
    """What was given, unless that is nothing and the method's own words do not name it either."""
    named = given is not None or re.search(rf"\b{name}\s*=", method)
    return given if named else default


class _Prepared(NamedTuple):
    """A reducer for the model, the model's parameters in its order, and where they lie."""

    reducer: Averager
    parameters: Parameters
    device: SummingDevice | None


def _prepare_together(
    comm: GroupCommunicator,
    kind: Kind,
    method: str,
    given: dict[str, Any],
    timeout: timedelta | None,
    scaler: object,
    terms: str,
) -> _Prepared:
    """`_prepare` on all ranks or on none: a rank that refuses leaves nobody waiting. `terms`: what
    they must have alike beside the reducer.
    """
    refusal: Exception | None = None
    try:
        prepared = _prepare(comm, kind, method, given, timeout, scaler)
    except Exception as error:
        refusal = error
    try:
        if refusal is None:
            comm.concur(f"{kind.introduction(prepared.reducer)}{terms}")
        else:
            comm.concur(refusal_of(refusal))
    except ValueError:
        if refusal is None:
            raise
    if refusal is not None:
        raise refusal
    return prepared


def _prepare(
    comm: GroupCommunicator,
    kind: Kind,
    method: str,
    given: dict[str, Any],
    timeout: timedelta | None,
    scaler: object,
) -> _Prepared:
    """Raises what speaks against attaching, on this rank."""
    if timeout is not None and not _is_valid(timeout):
        raise ValueError(f"timeout must be a positive timedelta, not {timeout!r}")
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise ValueError(f"scaler must be a GradScaler, not {type(scaler).__name__}")
    kind.check()
    parameters = kind.parameters()
    for name, parameter in parameters.items():
        check_parameter(name, parameter)
    local = {name: kind.local(parameter) for name, parameter in parameters.items()}
    layout = Layout([(name, stored_shape(each)) for name, each in local.items()])
    settings = {name: value for name, value in given.items() if value is not None}
    device = _device_of(local.values(), comm)
    if device is not None:
        whole = sum(each.numel() for each in parameters.values())
        usual = bucket_cap_mb(whole / kind.cut_into)  # the same on all ranks, as shards may not be
        cap = _or_default(settings.get("bucket_cap_mb"), "bucket_cap_mb", method, usual)
        settings |= {} if cap is None else {"bucket_cap_mb": cap}
        device.adder = comm.adder()
    reducer = kind.reducer(comm, layout, method, settings)
    reducer.use(device)
    return _Prepared(reducer, parameters, device)


def _device_of(parameters: Iterable[torch.Tensor], comm: GroupCommunicator) -> SummingDevice | None:
    """Where gradients stay; None if they come to main memory."""
    place = place_of(parameters)
    if place is None or not isinstance(comm, Levels):
        return None if place is None else SummingDevice(place)
    return MachineDevice(place) if comm.has_devices else None


def _is_valid(timeout: object) -> TypeGuard[timedelta]:
    return isinstance(timeout, timedelta) and timeout > timedelta(0)
