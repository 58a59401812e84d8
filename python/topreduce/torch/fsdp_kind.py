"""FSDP2 models (fully_shard) whose replicas nobody else averages."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from topreduce import Layout, Reducer
from topreduce.torch.averager import Averager
from topreduce.torch.checkpoint import Book
from topreduce.torch.fsdp import FSDPShards, check_shards, reshard, shard_mesh
from topreduce.torch.kinds import Parameters
from topreduce.torch.meeting import Group
from topreduce.torch.module_kind import ModuleKind
from topreduce.torch.process_group import GroupCommunicator
from topreduce.torch.replicas import Grid, Replicas, check_mesh, group_of
from topreduce.torch.sharded_checkpoint import ShardedBook


class FSDPKind(ModuleKind):
    """See kinds.Kind."""

    def __init__(self, root: torch.nn.Module, replicas: object) -> None:
        """`replicas`: as attach() was given it."""
        group = group_of(replicas)
        super().__init__(root, group)
        reshard(root)
        self._mesh = shard_mesh(root)
        self.cut_into = self._mesh.size()
        self.grid = Grid(group, self._mesh.get_group())
        check_mesh(replicas, self.grid)
        self.shards = FSDPShards(root, self.parameters(), group.size())

    def places(self) -> Sequence[Group]:
        return [self.grid.between, self.grid.inside]

    def connect(self, local_group: object, timeout: timedelta) -> GroupCommunicator:
        return Replicas(self.grid, timeout)

    def check(self) -> None:
        check_shards(self.module, self.parameters())
        self.check_hooks()

    def reducer(
        self, comm: GroupCommunicator, layout: Layout, method: str, settings: dict[str, Any]
    ) -> Reducer:
        assert isinstance(comm, Replicas)
        reducer = super().reducer(comm, layout, method, settings)
        reducer.commit_with(comm.shards)
        return reducer

    def book(self, parameters: Parameters) -> Book:
        return ShardedBook(parameters, self._mesh)

    def introduction(self, reducer: Averager) -> str:
        """The reducer asks the ranks of its own shard alone."""
        settings = sorted(reducer.spec.items())
        return "".join(f"{k}={v}, " for k, v in settings if k != "threads")
