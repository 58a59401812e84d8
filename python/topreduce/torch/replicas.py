"""Connections of a sharded model: those that hold the same shard, and those of the same replica.

          shard 0   shard 1
replica 0    0    =    1          = inside: one word before each commit, usually in a machine
             |         |          | between: the shard's gradients, over the network
replica 1    2    =    3
"""

import json
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from topreduce import CommError
from topreduce.torch.meeting import refuse
from topreduce.torch.process_group import Circle, GroupCommunicator, expect_same


class Grid:
    """Where this rank stands."""

    def __init__(self, replicas: dist.ProcessGroup, shards: dist.ProcessGroup) -> None:
        between, inside = (dist.get_process_group_ranks(each) for each in (replicas, shards))
        rank = dist.get_rank()
        if set(between) & set(inside) != {rank}:
            raise ValueError(
                f"replicas are ranks that hold the same shard, and ranks {between} are not: they "
                f"share the shards {inside}. Give the other dimension of the mesh; a model with "
                "one replica has nothing to average, and is left to FSDP"
            )
        self.replica, self.shard = between.index(rank), inside.index(rank)
        title = f"rank {rank} (replica {self.replica} of {len(between)}, "
        title += f"shard {self.shard} of {len(inside)})"
        name = f"{replicas.group_name}/replicas {between}"
        self.between = Circle(name, between, self.replica, title)
        name = f"{shards.group_name}/shards {inside}"
        self.inside = Circle(name, inside, self.shard, title)


class Replicas(GroupCommunicator):
    """The ranks that hold the same shard, and `shards`, those of the same replica. Collective."""

    def __init__(self, grid: Grid, timeout: timedelta) -> None:
        self._inside: list[GroupCommunicator] = []  # `shards`, once it is there
        try:
            super().__init__(grid.between, timeout)
        except Exception as error:
            refuse([grid.inside], error)
            raise
        try:
            self._inside.append(GroupCommunicator(grid.inside, timeout))
            # Who waits in one of them is no silent peer in the other.
            self.beside, self.shards.beside = [self.shards], [self]
            # Steps and calls end inside: until then nobody of this replica may leave.
            self.needed = [self.shards]
            self._check_places(grid)
        except BaseException as error:
            self.close(f"attach: {error}")
            raise

    @property
    def shards(self) -> GroupCommunicator:
        return self._inside[0]

    def _check_places(self, grid: Grid) -> None:
        """ValueError on all ranks unless each shard is held by one rank of every replica."""
        places = self._ask_all(f"shard {grid.shard} of {len(grid.inside.ranks)}")
        for by_shard in places:
            expected = [f"shard {shard} of {len(by_shard)}" for shard in range(len(by_shard))]
            if by_shard != expected or len(by_shard) != len(places[0]):
                raise ValueError(
                    "replicas must be ranks that hold the same shard, and as many of each: by "
                    f"replica they hold {places}"
                )

    def concur(self, word: str) -> None:
        """Over all ranks of the model."""
        expect_same(
            {
                f"replica {replica}, shard {shard}": each
                for replica, part in enumerate(self._ask_all(word))
                for shard, each in enumerate(part)
            }
        )

    def ask_everyone(self, word: str) -> list[str]:
        return [each for part in self._ask_all(word) for each in part]

    def _ask_all(self, word: str) -> list[list[str]]:
        """What all ranks of the model say, by replica and shard.

        The replicas first: who makes a call alone holds up its own replica in FSDP, which does not
        hear of it before the time-out.
        """
        try:
            own = self.ask(word)
            by_shard = [json.loads(each) for each in self.shards.ask(json.dumps(own))]
        except ValueError as error:
            # Some ranks are elsewhere, and others cannot hear of it but by losing us.
            raise CommError(str(error)) from None
        if len({len(each) for each in by_shard}) > 1:
            raise ValueError(f"the shards have different numbers of replicas: {by_shard}")
        return [list(words) for words in zip(*by_shard, strict=True)]

    def enter(self, call: str, step: int = 0) -> None:
        for part in self._inside:
            part.enter(call, step)
        super().enter(call, step)

    def trim(self) -> None:
        for part in self._inside:
            part.trim()
        super().trim()

    def close(self, word: str = "") -> None:
        super().close(word)
        for part in self._inside:
            part.close(word)

    def interrupt(self, why: str) -> None:
        super().interrupt(why)
        for part in self._inside:
            part.interrupt(why)

    def end_threads(self) -> None:
        super().end_threads()
        for part in self._inside:
            part.end_threads()


def check_mesh(replicas: object, grid: Grid) -> None:
    """ValueError if ranks beside those of the grid may hold the same shards."""
    if not isinstance(replicas, DeviceMesh):
        return
    whole = replicas._get_root_mesh()
    if whole.size() > grid.between.size() * grid.inside.size():
        raise ValueError(
            f"replicas is one dimension of a mesh ({', '.join(whole.mesh_dim_names or ())}) with "
            "more ranks than replicas and shards. Where those hold the same shards, as with tensor "
            "parallelism, they would drift apart. If they hold none in common, as pipeline stages "
            "do, attach with replicas=mesh.get_group('replicate')"
        )


def group_of(replicas: object) -> dist.ProcessGroup:
    """The process group that `replicas` of attach() means."""
    if isinstance(replicas, DeviceMesh):
        if replicas.ndim != 1:
            raise ValueError(
                f"replicas must be a mesh of one dimension, not of {replicas.ndim}: "
                "mesh['replicate']"
            )
        group: dist.ProcessGroup = replicas.get_group()
        return group
    if isinstance(replicas, dist.ProcessGroup):
        return replicas
    raise TypeError(
        f"replicas must be a DeviceMesh or a process group, not {type(replicas).__name__}"
    )
