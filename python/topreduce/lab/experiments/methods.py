"""The methods that a race compares: what PyTorch has today, and ours by their spec strings."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import topreduce.torch
from topreduce import Layout, Reducer
from topreduce.lab.experiments.diloco import DiLoCo
from topreduce.lab.experiments.sharding import NATIVE, mesh_of, shard, shard_natively
from topreduce.torch.attachment import RAMP_STEPS, WARMUP_STEPS, found_by_default

OURS = "topreduce."  # "topreduce.dense" is our dense, "dense" is DDP's own all-reduce
STEPS_BEFORE_POWERSGD = 2  # it refuses to begin earlier
LOCAL_SGD_WARMUP = 10
AGAIN = " (A/A)"  # after the name of a method that is measured a second time
_SCHEDULE = ("warmup_steps", "ramp_steps", "seed")
_FIRST_STEPS = re.compile(r"\b(warmup_steps|ramp_steps)=(\d+)")


class Attached:
    """A model with the method at work."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.sync: topreduce.torch.Sync | None = None
        self.averager: PeriodicModelAverager | DiLoCo | None = None

    def after_step(self) -> None:
        """To be called after the optimizer."""
        if self.averager is not None:
            self.averager.average_parameters(self.model.parameters())

    def stats(self) -> dict[str, Any]:
        """Of the last step; empty unless the method is ours."""
        return self.sync.stats() if self.sync is not None else {}

    def close(self) -> None:
        if self.sync is not None:
            self.sync.detach()


@dataclass(frozen=True)
class Method:
    """A name for the table, and what it stands for."""

    label: str
    spec: str
    replay: str = ""  # what each step sends, instead of a search for it

    @property
    def is_ours(self) -> bool:
        return self.spec.partition(":")[0] not in STOCK

    @property
    def is_local(self) -> bool:
        """Whether most of its steps send nothing, so that one step does not tell its time."""
        return self.spec.partition(":")[0] in LOCAL

    @property
    def searches(self) -> bool:
        """Whether it finds its density while it runs."""
        spec = self.spec.removeprefix(OURS)
        named = re.search(r"\bdensity=([^,]*)", spec)
        density = named[1] if named else found_by_default(spec)
        return self.is_ours and density == "auto"

    def steady(self) -> Method:
        """Without the steps that a training begins with, which send more."""
        if not self.is_ours:
            return self
        spec = _without(self.spec, _SCHEDULE)
        return Method(self.label, _with(spec, "warmup_steps=0,ramp_steps=0"))

    def again(self) -> Method:
        """The same under another name: what the two differ by is noise."""
        return Method(self.label + AGAIN, self.spec)

    def attach(self, model: nn.Module, seed: int, shards: int = 1) -> Attached:
        """Wraps the model in DDP, or cuts it into shards. Collective."""
        name, _, argument = self.spec.partition(":")
        if not self.is_ours and shards > 1:
            return Attached(shard_natively(model, shards, name))
        if not self.is_ours:
            # PowerSGD sends from callbacks, whose order differs by rank: it can have one bucket.
            bucket_cap_mb = 1 << 20 if name == "powersgd" else None
            ddp = _in_ddp(model, bucket_cap_mb)
            attached = Attached(ddp)
            STOCK[name](attached, ddp, argument)
            return attached
        spec = self.spec.removeprefix(OURS)
        own_seed = None if re.search(r"\bseed=", spec) else seed
        if shards > 1:
            mesh = mesh_of(model, shards)
            attached, replicas = Attached(shard(model, mesh["shard"])), mesh["replicate"]
        else:
            attached, replicas = Attached(_in_ddp(model)), None
        attached.sync = topreduce.torch.attach(
            attached.model,
            spec,
            seed=own_seed,
            replicas=replicas,
            density=self.replay or None,
        )
        return attached


def _in_ddp(model: nn.Module, bucket_cap_mb: int | None = None) -> DistributedDataParallel:
    """Weights that all ranks made alike, from their seed, are not sent over the slow network."""
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    own = int.from_bytes(digest.digest()[:7], "big")
    ends = torch.tensor([own, -own])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    alike = int(ends.sum()) == 0
    return DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, init_sync=not alike)


def steps_before_steady(spec: str) -> int:
    """Steps of a method in which it sends more than later; 0 if there are none."""
    if not Method(spec, spec).is_ours or spec.removeprefix(OURS).partition(":")[0] == "dense":
        return 0
    settings = {"warmup_steps": WARMUP_STEPS, "ramp_steps": RAMP_STEPS}
    settings |= {name: int(number) for name, number in _FIRST_STEPS.findall(spec)}
    return sum(settings.values())


def too_short(label: str, spec: str, steps: int) -> str:
    """A warning of a training that ends before the method has come to its density; or nothing."""
    first = steps_before_steady(spec)
    if steps >= first:
        return ""
    return (
        f"{label}: {steps} steps of training, of which {first} are warm-up and ramp, so it sends "
        "more than it would later. Train longer, or give warmup_steps and ramp_steps."
    )


# ---- what PyTorch has -----------------------------------------------------------------------


Register = Callable[[Attached, DistributedDataParallel, str], None]


def _hook(hook: Any) -> Register:
    def register(attached: Attached, ddp: DistributedDataParallel, argument: str) -> None:
        ddp.register_comm_hook(None, hook)

    return register


def _powersgd(attached: Attached, ddp: DistributedDataParallel, argument: str) -> None:
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=int(argument or 1),
        start_powerSGD_iter=STEPS_BEFORE_POWERSGD,
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _post_local_sgd(attached: Attached, ddp: DistributedDataParallel, argument: str) -> None:
    state = post_localSGD_hook.PostLocalSGDState(  # type: ignore[no-untyped-call]
        process_group=None,
        subgroup=None,
        start_localSGD_iter=LOCAL_SGD_WARMUP,
        post_local_gradient_allreduce=False,
    )
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    attached.averager = PeriodicModelAverager(
        period=int(argument or 10), warmup_steps=LOCAL_SGD_WARMUP
    )


def _diloco(attached: Attached, ddp: DistributedDataParallel, argument: str) -> None:
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    attached.averager = DiLoCo(ddp.parameters(), period=int(argument or 30))


STOCK: dict[str, Register] = {
    "noop": _hook(debugging_hooks.noop_hook),
    "dense": _hook(default_hooks.allreduce_hook),
    "fp16": _hook(default_hooks.fp16_compress_hook),
    # Under its own name DDP takes this hook with NCCL only, though Gloo adds up bf16 too.
    "bf16": _hook(lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)),
    "powersgd": _powersgd,
    "post_local_sgd": _post_local_sgd,
    "diloco": _diloco,
}
LOCAL = ("post_local_sgd", "diloco")
_WITH_NUMBER = ("powersgd", *LOCAL)


# ---- reading the command line ---------------------------------------------------------------


def parse_methods(words: str, shards: int = 1) -> list[Method]:
    """Methods from "noop,dense,powersgd:4,ok_topk:density=0.01,values=bf16".

    ValueError, with what is known, for one that no rank could run; `shards`: ranks on a host.
    """
    specs: list[str] = []
    for piece in words.split(","):
        piece = piece.strip()
        if specs and re.match(r"[^:(]*=", piece):  # a further setting of the method before it
            specs[-1] += f",{piece}"
        elif piece:
            specs.append(piece)
    if not specs:
        raise ValueError("no method is given")
    for spec in specs:
        _check(spec)
        name = spec.partition(":")[0]
        if shards > 1 and name in STOCK and name not in NATIVE:
            raise ValueError(
                f"method {name!r} needs DistributedDataParallel, and --shards uses FSDP; of "
                f"PyTorch's own take {', '.join(NATIVE)}"
            )
    if len(set(specs)) < len(specs):
        raise ValueError(f"a method is given twice in {words!r}; the A/A row is added anyway")
    return [Method(spec, spec) for spec in specs]


def _check(spec: str) -> None:
    name, _, argument = spec.partition(":")
    if name not in STOCK:
        try:
            Reducer(Layout([("weight", [8, 8])]), spec.removeprefix(OURS))
        except ValueError as error:
            others = f"; of others: {', '.join(STOCK)}" if "unknown method" in str(error) else ""
            raise ValueError(f"{error}{others}") from None
    elif argument and name not in _WITH_NUMBER:
        raise ValueError(f"method {spec!r}: {name} takes no settings")
    elif argument and not re.fullmatch("[1-9][0-9]*", argument):
        raise ValueError(f"method {spec!r}: write it as {name}:4")


def _with(spec: str, settings: str) -> str:
    return f"{spec}{',' if ':' in spec else ':'}{settings}"


def _without(spec: str, names: tuple[str, ...]) -> str:
    """The spec without these settings."""
    name, colon, settings = spec.partition(":")
    kept, depth = [], 0
    for piece in settings.split(","):
        if depth > 0 or piece.partition("=")[0] not in names:
            kept.append(piece)
        depth += piece.count("(") - piece.count(")")
    return name + (colon + ",".join(kept) if any(kept) else "")
