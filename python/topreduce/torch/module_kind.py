"""Modules that nobody else averages: loops without DistributedDataParallel."""

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from topreduce import Layout, Reducer
from topreduce.torch.averager import Averager
from topreduce.torch.checkpoint import Book, WholeBook
from topreduce.torch.device import GradientDevice
from topreduce.torch.eligibility import check_hooks, check_module
from topreduce.torch.gradients import Shards, Whole
from topreduce.torch.kinds import Attached, Parameters, patience_of, plain_name
from topreduce.torch.meeting import Group, Ranks
from topreduce.torch.module import ModuleAdapter
from topreduce.torch.process_group import GroupCommunicator
from topreduce.torch.steps import Steps
from topreduce.torch.weights import make_equal

_adapters: "weakref.WeakKeyDictionary[torch.nn.Module, ModuleAdapter]" = weakref.WeakKeyDictionary()


class ModuleKind:
    """See kinds.Kind."""

    advice = "detach() and attach again"
    cut_into = 1

    def __init__(self, module: torch.nn.Module, group: dist.ProcessGroup | Ranks) -> None:
        self.model = self.module = module
        self.group = group
        self.shards: Shards = Whole()

    def places(self) -> Sequence[Group]:
        return [self.group]

    def is_attached(self) -> bool:
        adapter = _adapters.get(self.module)
        return adapter is not None and adapter.attached

    def timeout(self) -> timedelta:
        return patience_of(self.group, self.module)

    def connect(self, local_group: object, timeout: timedelta) -> GroupCommunicator:
        return GroupCommunicator(self.group, timeout)

    def check(self) -> None:
        check_module(self.module)
        self.check_hooks()

    def check_hooks(self) -> None:
        before = _adapters.get(self.module)
        check_hooks(self.parameters(), None if before is None else before.taker)

    def parameters(self) -> Parameters:
        return self._named(trained=True)

    def frozen(self) -> Parameters:
        return self._named(trained=False)

    def _named(self, *, trained: bool) -> Parameters:
        return {
            plain_name(name): parameter
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad is trained
        }

    def local(self, parameter: Tensor) -> Tensor:
        return self.shards.local(parameter)

    def reducer(
        self, comm: GroupCommunicator, layout: Layout, method: str, settings: dict[str, Any]
    ) -> Reducer:
        return Reducer(layout, method, **settings)

    def introduction(self, reducer: Averager) -> str:
        return ""

    def book(self, parameters: Parameters) -> Book:
        return WholeBook()

    def debts(self) -> str:
        adapter = _adapters.get(self.module)
        return "" if adapter is None else adapter.owed

    def take_over(self, comm: GroupCommunicator) -> None:
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        local = {plain_name(name): self.local(each.detach()) for name, each in tensors.items()}
        make_equal(local, comm, self.group)

    def start(
        self,
        steps: Steps,
        reducer: Averager,
        parameters: Parameters,
        device: GradientDevice | None,
    ) -> Attached:
        assert isinstance(reducer, Reducer)
        before = _adapters.get(self.module)
        if before is not None:
            before.remove()
        adapter = ModuleAdapter(
            self.module, parameters, self.group, self.shards, steps, reducer, device
        )
        _adapters[self.module] = adapter
        regroup = adapter.regroup if type(self) is ModuleKind else None
        module = weakref.ref(self.module)
        return Attached(adapter.release, adapter.hold, self.book(parameters), module, regroup)
