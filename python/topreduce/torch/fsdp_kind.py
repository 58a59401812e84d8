"""FSDP2 models (fully_shard) whose replicas nobody else averages."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from topreduce import Layout, Reducer
from topreduce.torch.checkpoint import Book
from topreduce.torch.fsdp import FSDPShards, check_shards, local_part, shard_mesh
from topreduce.torch.kinds import Parameters
from topreduce.torch.meeting import Group
from topreduce.torch.module_kind import ModuleKind
from topreduce.torch.process_group import GroupCommunicator
from topreduce.torch.replicas import Grid, Replicas
from topreduce.torch.sharded_checkpoint import ShardedBook
from topreduce.torch.weights import make_equal


class FSDPKind(ModuleKind):
    """See kinds.Kind."""

    def __init__(self, root: torch.nn.Module, replicas: dist.ProcessGroup) -> None:
        super().__init__(root, replicas)
        self._mesh = shard_mesh(root)
        self.grid = Grid(replicas, self._mesh.get_group())
        self.shards = FSDPShards(root, self.parameters(), replicas.size())

    def places(self) -> Sequence[Group]:
        return [self.grid.between, self.grid.inside]

    def connect(self, local_group: object, timeout: timedelta) -> GroupCommunicator:
        return Replicas(self.grid, timeout)

    def check(self) -> None:
        check_shards(self.module, self.parameters())

    def reducer(
        self, comm: GroupCommunicator, layout: Layout, method: str, settings: dict[str, object]
    ) -> Reducer:
        assert isinstance(comm, Replicas)
        reducer = super().reducer(comm, layout, method, settings)
        reducer.commit_with(comm.shards)
        return reducer

    def book(self, parameters: Parameters) -> Book:
        return ShardedBook(parameters, self._mesh)

    def introduction(self, reducer: Reducer) -> str:
        """The reducer asks the ranks of its own shard alone."""
        settings = sorted(reducer.spec.items())
        return "ready, " + ", ".join(f"{k}={v}" for k, v in settings if k != "threads")

    def take_over(self, comm: GroupCommunicator) -> None:
        """FSDP sees to it that the shards of a replica fit; here replicas become equal."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        make_equal([local_part(each.detach()) for each in tensors], comm, self.group)
