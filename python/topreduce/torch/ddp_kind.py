"""DistributedDataParallel models, and the one hook that DDP lets us register."""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from topreduce import Layout, Reducer
from topreduce.torch.averager import Averager
from topreduce.torch.checkpoint import WholeBook
from topreduce.torch.ddp import DDPAdapter
from topreduce.torch.device import GradientDevice
from topreduce.torch.eligibility import REMEDY, check_ddp
from topreduce.torch.kinds import Attached, Parameters, patience_of, plain_name
from topreduce.torch.machines import Levels
from topreduce.torch.meeting import Group, Ranks
from topreduce.torch.process_group import GroupCommunicator
from topreduce.torch.steps import Steps
from topreduce.torch.two_levels import on_two_levels


class _Dispatcher:
    """Whom DDP's hook serves. DDP cannot remove a hook, so it stays when the handle goes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # DDP's C++ part owns this object, where the garbage collector sees no cycle: nothing here
        # may lead back to the DDP model.
        self.group = group
        self.adapter: DDPAdapter | None = None
        self.owed = ""  # says so if an earlier handle left debts

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        if self.adapter is not None:
            return self.adapter.reduce(bucket)
        return allreduce_hook(self.group, bucket)

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


def _hook(state: _Dispatcher, bucket: GradBucket) -> Future[Tensor]:
    return state.reduce(bucket)


class DDPKind:
    """See kinds.Kind."""

    advice = REMEDY
    cut_into = 1

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.model: DistributedDataParallel = ddp
        self.module: torch.nn.Module = ddp.module
        self.group: dist.ProcessGroup | Ranks = ddp.process_group
        self._one_level = True

    def places(self) -> Sequence[Group]:
        return [self.model.process_group]

    def is_attached(self) -> bool:
        dispatcher = _dispatchers.get(self.model)
        return dispatcher is not None and dispatcher.adapter is not None

    def timeout(self) -> timedelta:
        return patience_of(self.model.process_group, self.model)

    def connect(self, local_group: object, timeout: timedelta) -> GroupCommunicator:
        self._one_level = local_group is None
        if local_group is None:
            return GroupCommunicator(self.model.process_group, timeout)
        return Levels(self.model.process_group, local_group, timeout)

    def check(self) -> None:
        check_ddp(self.model)
        if self.model not in _dispatchers:
            hook = self.model._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
            if hook:
                raise ValueError(f"DDP takes one hook and already has {hook}: {REMEDY}")

    def parameters(self) -> Parameters:
        """Those that DDP reduces."""
        buckets = self.model.reducer._get_zeros_like_grad_buckets()
        reduced = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
        parameters = {}
        for name, parameter in self.module.named_parameters():
            if id(parameter) in reduced:
                parameters[plain_name(name)] = parameter
            elif parameter.requires_grad and name not in self.model.parameters_to_ignore:
                raise ValueError(
                    f"{name} was frozen when DDP wrapped it, and never gets a mean: {REMEDY}"
                )
        return parameters

    def frozen(self) -> Parameters:
        return {
            plain_name(name): parameter
            for name, parameter in self.module.named_parameters()
            if not parameter.requires_grad and name not in self.model.parameters_to_ignore
        }

    def local(self, parameter: Tensor) -> Tensor:
        return parameter

    def reducer(
        self, comm: GroupCommunicator, layout: Layout, method: str, settings: dict[str, Any]
    ) -> Averager:
        if isinstance(comm, Levels):
            return on_two_levels(comm, layout, method, settings)
        return Reducer(layout, method, **settings)

    def introduction(self, reducer: Averager) -> str:
        return ""

    def debts(self) -> str:
        dispatcher = _dispatchers.get(self.model)
        return "" if dispatcher is None else dispatcher.owed

    def take_over(self, comm: GroupCommunicator) -> None:
        if self.model not in _dispatchers:
            dispatcher = _Dispatcher(self.model.process_group)
            self.model.register_comm_hook(dispatcher, _hook)
            _dispatchers[self.model] = dispatcher

    def start(
        self,
        steps: Steps,
        reducer: Averager,
        parameters: Parameters,
        device: GradientDevice | None,
    ) -> Attached:
        dispatcher = _dispatchers[self.model]
        dispatcher.owed = ""
        dispatcher.adapter = DDPAdapter(self.model, steps, reducer, parameters, device)
        ddp = weakref.ref(self.model)
        regroup = _Regroup(ddp, dispatcher) if self._one_level else None
        module = weakref.ref(self.module)
        return Attached(dispatcher.release, _NoSync(ddp), WholeBook(), module, regroup)


class _Regroup:
    """DDP goes on with other ranks."""

    takes_ranks = False

    def __init__(
        self, ddp: "weakref.ref[DistributedDataParallel]", dispatcher: _Dispatcher
    ) -> None:
        self._ddp, self._dispatcher = ddp, dispatcher

    def __call__(self, group: dist.ProcessGroup | Ranks) -> None:
        assert isinstance(group, dist.ProcessGroup)  # Sync.rebuild has looked
        ddp = self._ddp()
        if ddp is None:
            raise ValueError("rebuild: the model is gone")
        ddp._update_process_group(group)  # type: ignore[no-untyped-call]
        self._dispatcher.group = group


class _NoSync:
    """DDP's own way to hold gradients back; DDP owns what owns this."""

    def __init__(self, ddp: "weakref.ref[DistributedDataParallel]") -> None:
        self._ddp = ddp

    def __call__(self) -> AbstractContextManager[None]:
        ddp = self._ddp()
        if ddp is None:
            raise ValueError("hold: the model is gone")
        return ddp.no_sync()
